"""The part that every white-box harness shares: messages, model calls, budgets, the record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from harness_bridges.chat import (
    Message,
    Sampled,
    prompt_ids,
    render_pieces,
    sampled_text,
    with_note,
)
from harness_bridges.engine import ChatTokenizer, Engine, RunIds, RunLimits, Session, Shell
from harness_bridges.errors import ConfigError
from harness_bridges.record import Episode
from harness_bridges.recorder import Recorder

STATUS_OF_END = {
    "environment": "completed",
    "turns": "truncated",
    "context": "truncated",
    "aborted": "aborted",
}


class Conversation:
    """One running episode. A harness edits `messages`; the record follows from what is sent."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        session: Session,
        limits: RunLimits,
        ids: RunIds,
        open_shell: Callable[[], Awaitable[Shell]] | None = None,
    ) -> None:
        self.session = session
        self.limits = limits
        self.messages = [Message(role, (text,)) for role, text in session.opening]
        self.turns_left = limits.max_turns
        """Policy responses that the budget still has."""
        self.ended = "turns"
        """Why the episode is over: `environment`, `turns`, `context` (no room) or `aborted`."""
        self.tool_calls: list[dict[str, Any]] = []
        self._engine, self._chat, self._ids = engine, chat, ids
        self._open_shell = open_shell
        self._shell: Shell | None = None
        self._recorder = Recorder()
        self._rewards: list[float] = []
        self._edit = ("", "")
        self._sent: list[Message] = []

    def instruct(self, text: str) -> None:
        """Tell the policy about the harness's own actions, before the first call.

        The text joins the system message; if there is none, the first message.
        """
        first, *rest = self.messages
        self.messages = [Message(first.role, (*first.parts, "\n\n", text)), *rest]

    def observe(self, text: str) -> None:
        """Tell the policy something; it joins a user message that is not answered yet."""
        self.messages = with_note(self.messages, text)

    def token_count(self, text: str) -> int:
        """Tokens of a text on its own."""
        return len(self._chat.encode(text))

    def clip(self, text: str, max_tokens: int) -> str:
        """The text, or its beginning and end if it has more than `max_tokens` tokens."""
        ids = self._chat.encode(text)
        if len(ids) <= max_tokens:
            return text
        head, tail = ids[: max_tokens // 2], ids[len(ids) - max_tokens // 2 :]
        left_out = len(ids) - len(head) - len(tail)
        note = f"\n[{left_out} tokens left out]\n"
        return self._chat.decode(head) + note + self._chat.decode(tail)

    def declare_edit(self, kind: str, cause: str) -> None:
        """Say what the messages' change since the last call was; the next call records it.

        Undeclared changes are recorded too: as a `replace` by the `harness`, or, if the messages
        only grew, as a `strip` by the `chat_template`.
        """
        self._edit = (kind, cause)

    def prompt_length(self, messages: Sequence[Message] | None = None) -> int:
        """Tokens of the prompt that the next call would send (or of other messages)."""
        shown = self.messages if messages is None else messages
        return prompt_ids(render_pieces(self._chat, shown)).size

    async def shell(self) -> Shell:
        """The episode's private workspace, opened when first asked for.

        Raises:
            ConfigError: nobody gave this episode a sandbox.
        """
        if self._shell is None:
            if self._open_shell is None:
                raise ConfigError("this harness runs commands; give the rollout a sandbox")
            self._shell = await self._open_shell()
        return self._shell

    async def close(self) -> None:
        """Release the session and the workspace."""
        try:
            self.session.close()
        finally:
            if self._shell is not None:
                await self._shell.close()

    async def sample(
        self,
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        messages: Sequence[Message] | None = None,
    ) -> Sampled | None:
        """One model call on the messages, or on others. None if the context cannot hold it or the
        engine aborted it.

        What was sampled enters the record, but not the messages: that is the harness's choice.
        """
        shown = list(self.messages if messages is None else messages)
        pieces = render_pieces(self._chat, shown)
        prompt = prompt_ids(pieces)
        room = self.limits.max_context - prompt.size
        if room < 1 and not self._recorder.turns:
            raise ConfigError(
                f"the opening prompt has {prompt.size} tokens, the context holds "
                f"{self.limits.max_context}; raise rollout_max_context_len"
            )
        if room < 1:
            self.ended = "context"
        if room < 1 or self.ended == "aborted":
            return None
        generation = await self._engine.generate(
            prompt,
            max_new_tokens=min(max_new_tokens, room),
            temperature=self.limits.temperature,
            stop=stop,
        )
        turn = len(self._recorder.turns)
        self._recorder.add(pieces, generation, *self._label())
        self._edit = ("", "")
        self._sent = shown
        self._rewards.append(0.0)
        if generation.finish_reason == "abort":
            self.ended = "aborted"
            return None
        return sampled_text(self._chat, generation.output_ids.tolist(), turn)

    def _label(self) -> tuple[str, str]:
        """Kind and cause of an edit since the last call, should there be one."""
        if self._edit != ("", ""):
            return self._edit
        kept = self.messages[: len(self._sent)]
        grew = len(kept) == len(self._sent) and all(
            a is b for a, b in zip(kept, self._sent, strict=True)
        )
        return ("strip", "chat_template") if grew else ("replace", "harness")

    async def respond(
        self, *, stop: Sequence[str] = (), max_new_tokens: int | None = None
    ) -> Sampled | None:
        """One policy response; it takes a turn of the budget and joins the messages.

        Args:
            stop: where a response ends besides the environment's own stop strings.
            max_new_tokens: default: the episode's limit.

        Returns:
            None: the budget or the context is exhausted, or the engine aborted.
        """
        if self.turns_left < 1:
            self.ended = "turns"
            return None
        self.turns_left -= 1
        response = await self.sample(
            stop=(*self.session.stop, *stop),
            max_new_tokens=max_new_tokens or self.limits.max_new_tokens,
        )
        if response is not None:
            self.messages.append(Message("assistant", (response,)))
        return response

    def step(self, response: Sampled) -> bool:
        """The environment acts on a response and answers. False: the episode is over."""
        step = self.session.step(response.text)
        self._rewards[response.turn] += step.reward
        if step.done:
            self.ended = "environment"
            return False
        self.messages.append(Message("user", (step.observation,)))
        return True

    async def act(self) -> bool:
        """One policy response and the environment's answer to it. False: the episode is over."""
        response = await self.respond()
        return response is not None and self.step(response)

    def note_call(self, tool: str, response: Sampled) -> None:
        """Remember, in the record's metadata, that a response called a tool of the harness."""
        self.tool_calls.append({"turn": response.turn, "tool": tool})

    def episode(self) -> Episode:
        """The finished record.

        Its metadata has `ended` and, if there were any, the harness's `tool_calls`.
        """
        return self._recorder.episode(
            self._ids,
            turn_rewards=tuple(self._rewards),
            status=STATUS_OF_END[self.ended],
            metadata={
                "ended": self.ended,
                **({"tool_calls": self.tool_calls} if self.tool_calls else {}),
            },
        )
