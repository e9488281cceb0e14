"""`agentfold`: past a length threshold the policy folds its own past into a summary (002, E.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness_bridges.chat import Message, with_note
from harness_bridges.conversation import Conversation
from harness_bridges.errors import ConfigError
from harness_bridges.harness import register_harness

INSTRUCTION = (
    "Your context is nearly full. Write a short summary of what you have found so far and what "
    "is still missing. Earlier steps will be removed; only the summary stays."
)
EMPTY = "Your last summary was empty; nothing was removed."
LONGER = "Your last summary was not shorter than the steps it replaces; nothing was removed."
HEADING = "Summary of the earlier steps:\n"


@register_harness("agentfold")
class AgentFold:
    """Length-triggered folding.

    When the rendered prompt exceeds the threshold, the policy is asked for a summary of the
    steps so far. The summary is sampled (it is on-policy and gets gradient), takes the place of
    all exchanges but the last `agentfold_keep`, and the folded ones leave the live view. A later
    fold also folds the earlier summary. A summary that is empty, or not shorter than what it
    replaces, is the policy's own bad action: it costs a turn, nothing is folded, and the next
    request says why.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Settings of `agentfold`."""

        agentfold_threshold: int = 3000
        """Prompt tokens beyond which the past is folded (002, F.1)."""
        agentfold_summary_tokens: int = 256
        """Most tokens of one summary."""
        agentfold_keep: int = 1
        """Latest exchanges (response and observation) that are never folded."""

        def __post_init__(self) -> None:
            for name in ("agentfold_threshold", "agentfold_summary_tokens"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
            if self.agentfold_keep < 0:
                raise ConfigError(f"agentfold_keep={self.agentfold_keep}: must be at least 0")

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(self, conversation: Conversation) -> None:
        needed = self.config.agentfold_threshold + self.config.agentfold_summary_tokens
        if needed >= conversation.limits.max_context:
            raise ConfigError(
                f"agentfold_threshold + agentfold_summary_tokens = {needed}: must be below the "
                f"context of {conversation.limits.max_context} tokens, or no fold can happen"
            )
        opening = list(conversation.messages)
        problem = ""
        while await conversation.act():
            problem = await self._maybe_fold(conversation, opening, problem)

    async def _maybe_fold(
        self, conversation: Conversation, opening: Sequence[Message], problem: str
    ) -> str:
        """Fold if it is time to; returns what was wrong with the summary, or nothing.

        Args:
            conversation: the episode.
            opening: its first messages, never folded; a summary joins the last one.
            problem: of the last summary, if it could not be used: the policy is told.
        """
        messages = conversation.messages
        if conversation.turns_left < 1:
            return problem  # no call follows that would see the summary
        tail = len(messages) - 2 * self.config.agentfold_keep
        if tail <= len(opening) or conversation.prompt_length() <= self.config.agentfold_threshold:
            return problem
        request = with_note(messages, " ".join(filter(None, (problem, INSTRUCTION))))
        summary = await conversation.sample(
            messages=request, stop=(), max_new_tokens=self.config.agentfold_summary_tokens
        )
        if summary is None:
            return problem
        folded = [*with_note(opening, HEADING, summary), *messages[tail:]]
        if not summary.text.strip():
            return self._refused(conversation, EMPTY)
        if conversation.prompt_length(folded) >= conversation.prompt_length():
            return self._refused(conversation, LONGER)
        conversation.messages = folded
        conversation.declare_edit("fold", "length")
        return ""

    def _refused(self, conversation: Conversation, problem: str) -> str:
        """A summary that cannot be used is a bad action: it costs a turn and changes nothing."""
        conversation.turns_left -= 1
        conversation.declare_edit("strip", "harness")
        return problem

    @staticmethod
    def demonstrate(turn: int, prompt: str) -> str | None:
        """The probe's schedule: summaries are sampled freely."""
        return None if INSTRUCTION in prompt else ""
