"""`tc_rag`: a stack of tool-result envelopes that the policy pops (002, E.2, Fig. 3, App. A)."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness_bridges.chat import Message
from harness_bridges.conversation import Conversation
from harness_bridges.errors import ConfigError
from harness_bridges.harness import register_harness
from harness_bridges.tools import closing, find_call

TOOLS = ("pop",)
USAGE = (
    "You may also reply with exactly <pop></pop>: it removes the {which} result that you still "
    "see, for good. Use it when that result is of no more use."
)
POPPED = "The {which} result was removed."
EMPTY = "There is no result to remove."


@register_harness("tc_rag")
class TcRag:
    """Results are pushed on a stack; a `pop` removes one whole envelope and leaves no summary.

    A pop is the policy's own action. With `tc_rag_budget` the budget variant of App. A runs
    besides: past it, results that the policy has seen are popped until the prompt fits again.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Settings of `tc_rag`."""

        tc_rag_pop: str = "oldest"
        """Which envelope a pop removes: `oldest` (E.2) or `largest` (Fig. 3, App. A)."""
        tc_rag_budget: int | None = None
        """Prompt tokens beyond which the harness pops, too; None: the policy alone decides."""

        def __post_init__(self) -> None:
            if self.tc_rag_pop not in ("oldest", "largest"):
                raise ConfigError(f"tc_rag_pop={self.tc_rag_pop!r}: expected oldest or largest")
            if self.tc_rag_budget is not None and self.tc_rag_budget < 1:
                raise ConfigError(f"tc_rag_budget={self.tc_rag_budget}: must be at least 1")

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(self, conversation: Conversation) -> None:
        which = self.config.tc_rag_pop
        stack = _Stack(conversation, which)
        conversation.instruct(USAGE.format(which=which))
        while (response := await conversation.respond(stop=closing(TOOLS))) is not None:
            if find_call(response.text, TOOLS):
                conversation.note_call("pop", response)
                popped = stack.pop("policy")
                conversation.observe(POPPED.format(which=which) if popped else EMPTY)
            elif conversation.step(response):
                stack.envelopes.append(conversation.messages[-1])
                self._keep_budget(conversation, stack)
            else:
                return

    def _keep_budget(self, conversation: Conversation, stack: _Stack) -> None:
        budget = self.config.tc_rag_budget
        if budget is None:
            return
        # The newest result stays: the policy has not seen it yet.
        while conversation.prompt_length() > budget and stack.pop("length", keep=1):
            pass

    @staticmethod
    def demonstrate(turn: int, prompt: str) -> str | None:
        """The probe's schedule: two searches, both popped, the answer."""
        return "<pop></pop>" if turn in (2, 3) else ""


@dataclass
class _Stack:
    """The envelopes that are in the messages, oldest first."""

    conversation: Conversation
    which: str
    envelopes: list[Message] = field(default_factory=list)

    def pop(self, cause: str, *, keep: int = 0) -> bool:
        """Remove one envelope, but none of the newest `keep`; False if there is none."""
        candidates = self.envelopes[: len(self.envelopes) - keep]
        if not candidates:
            return False
        victim = candidates[0] if self.which == "oldest" else max(candidates, key=self._size)
        self.envelopes = [m for m in self.envelopes if m is not victim]
        messages = self.conversation.messages
        self.conversation.messages = [m for m in messages if m is not victim]
        self.conversation.declare_edit("pop", cause)
        return True

    def _size(self, envelope: Message) -> int:
        return self.conversation.token_count(envelope.text)
