"""The part that every white-box harness shares: messages, model calls, budgets, the record."""

from __future__ import annotations

from collections.abc import Sequence

from harness_bridges.chat import Message, Sampled, prompt_ids, render_pieces, sampled_text
from harness_bridges.engine import ChatTokenizer, Engine, RunIds, RunLimits, Session
from harness_bridges.errors import ConfigError
from harness_bridges.record import Episode
from harness_bridges.recorder import Recorder


class Conversation:
    """One running episode. A harness edits `messages`; the record follows from what is sent."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        session: Session,
        limits: RunLimits,
        ids: RunIds,
    ) -> None:
        self.session = session
        self.limits = limits
        self.messages = [Message(role, (text,)) for role, text in session.opening]
        self.status = "truncated"
        self._engine, self._chat, self._ids = engine, chat, ids
        self._recorder = Recorder()
        self._rewards: list[float] = []
        self._edit = ("", "")

    def declare_edit(self, kind: str, cause: str) -> None:
        """Say what the messages' change since the last call was; the next call records it."""
        self._edit = (kind, cause)

    def prompt_length(self) -> int:
        """Tokens of the prompt that the next call would send."""
        return prompt_ids(render_pieces(self._chat, self.messages)).size

    async def sample(
        self, *extra: Message, stop: Sequence[str], max_new_tokens: int
    ) -> Sampled | None:
        """One model call on the messages and `extra`. None if the context cannot hold it or the
        engine aborted it.

        What was sampled enters the record, but not the messages: that is the harness's choice.
        """
        pieces = render_pieces(self._chat, [*self.messages, *extra])
        prompt = prompt_ids(pieces)
        room = self.limits.max_context - prompt.size
        if room < 1 and not self._recorder.turns:
            raise ConfigError(
                f"the opening prompt has {prompt.size} tokens, the context holds "
                f"{self.limits.max_context}; raise rollout_max_context_len"
            )
        if room < 1 or self.status == "aborted":
            return None
        generation = await self._engine.generate(
            prompt,
            max_new_tokens=min(max_new_tokens, room),
            temperature=self.limits.temperature,
            stop=stop,
        )
        if generation.finish_reason == "abort":
            self.status = "aborted"
        turn = len(self._recorder.turns)
        self._recorder.add(pieces, generation, *self._edit)
        self._edit = ("", "")
        self._rewards.append(0.0)
        if self.status == "aborted":
            return None
        return sampled_text(self._chat, generation.output_ids.tolist(), turn)

    async def act(self) -> bool:
        """One policy response and the environment's answer to it. False: the episode is over."""
        response = await self.sample(
            stop=self.session.stop, max_new_tokens=self.limits.max_new_tokens
        )
        if response is None:
            return False
        step = self.session.step(response.text)
        self._rewards[-1] = step.reward
        if step.done:
            self.status = "completed"
            return False
        self.messages.append(Message("assistant", (response,)))
        self.messages.append(Message("user", (step.observation,)))
        return True

    def episode(self) -> Episode:
        """The finished record."""
        return self._recorder.episode(
            self._ids, turn_rewards=tuple(self._rewards), status=self.status
        )
