"""`memexrl`: the policy offloads spans to a store and retrieves them (002, E.2, Fig. 3)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness_bridges.chat import Message
from harness_bridges.conversation import Conversation
from harness_bridges.errors import ConfigError
from harness_bridges.harness import register_harness
from harness_bridges.tools import Call, closing, find_call, is_final, json_object

OFFLOAD, RETRIEVE = TOOLS = ("memory_offload", "memory_retrieve")
USAGE = (
    "Results are numbered. You may also reply with exactly one of:\n"
    '<memory_offload>{"name": "a name", "span": "2-3"}</memory_offload> puts results 2 to 3, and '
    "your replies between them, into a store; a short note stays\n"
    '<memory_retrieve>{"name": "a name"}</memory_retrieve> brings them back'
)
EXPECTED = 'expected JSON with a "name", for example {"name": "a name", "span": "2-3"}.'
STORED = "Stored. Your context is shorter now."
STUB = "[results {span} were stored as {name!r}]"
RESTORED = "The stored results are back in their old place."
ALL_BACK = "All stored results are back. Give your answer now; the store is closed."
CLOSED = "The store is closed. Give your answer now."


@register_harness("memexrl")
class MemexRL:
    """A session-local key-value store; what is in it is out of the context.

    Both operations are the policy's own actions. Before the answer turn everything that is still
    stored comes back: when the policy answers (its answer is kept as text, and it answers again),
    or when one turn is left. Nothing is restored that the context cannot hold.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Settings of `memexrl`."""

        memexrl_place: str = "old"
        """Where a retrieved span goes: its `old` place, or the `end` of the context."""

        def __post_init__(self) -> None:
            if self.memexrl_place not in ("old", "end"):
                raise ConfigError(f"memexrl_place={self.memexrl_place!r}: expected old or end")

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(self, conversation: Conversation) -> None:
        store = _Store(conversation, self.config.memexrl_place)
        conversation.instruct(USAGE)
        while True:
            if conversation.turns_left == 1:
                store.restore_all()
            response = await conversation.respond(stop=closing(TOOLS))
            if response is None:
                return
            call = find_call(response.text, TOOLS)
            if call is not None:
                conversation.note_call(call.tool, response)
                store.use(call)
            elif is_final(response.text, conversation.session) and store.restore_all():
                pass  # the policy answers again, with everything in view
            elif not conversation.step(response):
                return
            else:
                store.number_result()

    @staticmethod
    def demonstrate(turn: int, prompt: str) -> str | None:
        """The probe's schedule: two searches, both offloaded, the answer, and once more with all
        back."""
        both = '<memory_offload>{"name": "pages", "span": "1-2"}</memory_offload>'
        return both if turn == 2 else ""


@dataclass
class _Store:
    """The entries, and which numbered results are in the context."""

    conversation: Conversation
    place: str
    entries: dict[str, tuple[Message, list[Message]]] = field(default_factory=dict)
    """By name, oldest first: the stub that stands for the messages, and the messages."""
    results: list[Message] = field(default_factory=list)
    closed: bool = False

    def number_result(self) -> None:
        """Show the observation that just came with its number."""
        messages = self.conversation.messages
        numbered = Message("user", (f"[{len(self.results) + 1}] ", *messages[-1].parts))
        self.results.append(numbered)
        self.conversation.messages = [*messages[:-1], numbered]

    def use(self, call: Call) -> None:
        """Carry out a call; a wrong one is answered with what is wrong."""
        if self.closed:
            return self.conversation.observe(CLOSED)
        arguments = json_object(call.body) or {}
        name = arguments.get("name")
        if not isinstance(name, str) or not name:
            return self.conversation.observe(f"{call.tool}: {EXPECTED}")
        if call.tool == RETRIEVE:
            return self._retrieve(name)
        return self._offload(name, arguments.get("span"))

    def _offload(self, name: str, span: Any) -> None:
        conversation, messages = self.conversation, self.conversation.messages
        if name in self.entries:
            return conversation.observe(f"The name {name!r} is taken; choose another one.")
        bounds = self._bounds(span)
        if bounds is None:
            seen = [str(i + 1) for i, m in enumerate(self.results) if _where(messages, m) >= 0]
            text = f"span={span!r}: expected results that you see, as in '2' or '2-3'. You see: "
            return conversation.observe(f"{text}{', '.join(seen) or 'none'}.")
        start, stop = bounds
        stub = Message("user", (STUB.format(span=span, name=name),))
        self.entries[name] = (stub, messages[start:stop])
        conversation.messages = [*messages[:start], stub, *messages[stop:]]
        conversation.declare_edit("offload", "policy")
        conversation.observe(STORED)

    def _bounds(self, span: Any) -> tuple[int, int] | None:
        """Message indices of a span of results, both of whose ends are in the context."""
        ends = str(span).split("-")
        if not 1 <= len(ends) <= 2 or not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", e) for e in ends):
            return None
        first, last = int(ends[0]), int(ends[-1])
        if not 1 <= first <= last <= len(self.results):
            return None
        messages = self.conversation.messages
        start = _where(messages, self.results[first - 1])
        stop = _where(messages, self.results[last - 1])
        return (start, stop + 1) if 0 <= start <= stop else None

    def _retrieve(self, name: str) -> None:
        conversation = self.conversation
        if name not in self.entries:
            known = ", ".join(map(repr, self.entries)) or "nothing"
            return conversation.observe(f"{name!r} is not in the store. Stored: {known}.")
        stub, _ = self.entries[name]
        outer = [n for n, (_, inside) in self.entries.items() if _where(inside, stub) >= 0]
        if self.place == "old" and outer:
            return conversation.observe(f"{name!r} lies inside {outer[0]!r}; retrieve that first.")
        self._bring_back(name)
        conversation.declare_edit("retrieve", "policy")
        if self.place == "old":
            conversation.observe(RESTORED)

    def _bring_back(self, name: str) -> None:
        stub, inside = self.entries.pop(name)
        messages = self.conversation.messages
        if self.place == "end":
            self.conversation.messages = _joined(messages, inside)
            return
        at = _where(messages, stub)
        self.conversation.messages = [*messages[:at], *inside, *messages[at + 1 :]]

    def restore_all(self) -> bool:
        """The terminal restore; False if there is nothing to restore, no room or no turn left."""
        conversation = self.conversation
        before, entries = conversation.messages, dict(self.entries)
        # The latest entry may hold the stubs of earlier ones, never the other way round.
        for name in reversed(entries) if self.place == "old" else entries:
            self._bring_back(name)
        conversation.messages = _joined(conversation.messages, [Message("user", (ALL_BACK,))])
        room = conversation.limits.max_context - conversation.limits.max_new_tokens
        if not entries or not conversation.turns_left or conversation.prompt_length() > room:
            conversation.messages, self.entries = before, entries
            return False
        self.closed = True
        conversation.declare_edit("retrieve", "harness")
        return True


def _where(messages: Sequence[Message], message: Message) -> int:
    """Index of this very message; -1 if it is not there."""
    return next((i for i, m in enumerate(messages) if m is message), -1)


def _joined(messages: Sequence[Message], more: Sequence[Message]) -> list[Message]:
    """All messages; where two user messages would meet there is one."""
    if not more or messages[-1].role != "user" or more[0].role != "user":
        return [*messages, *more]
    both = Message("user", (*messages[-1].parts, "\n\n", *more[0].parts))
    return [*messages[:-1], both, *more[1:]]
