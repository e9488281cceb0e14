"""`compaction`: the response at a boundary is a summary and stays, the second interface control
of 000 (6.1)."""

from __future__ import annotations

from collections.abc import Sequence

from harness_bridges.boundary import MEMORY_BYTES, BoundaryConfig, play
from harness_bridges.chat import Message, Sampled, with_note
from harness_bridges.conversation import Conversation
from harness_bridges.harness import register_harness
from harness_bridges.tools import Call

REQUEST = (
    "Your context is about to be replaced. Reply with a summary of all that you need to go on (at "
    f"most {MEMORY_BYTES} bytes); only the summary stays."
)
HEADING = "Your context was replaced. Your summary of what came before:\n"


class SummaryMemory:
    """What the policy says at a boundary is all that it remembers."""

    tools: tuple[str, ...] = ()
    usage, request, kind = "", REQUEST, "compact"

    async def use(self, call: Call) -> str:
        raise AssertionError("compaction has no tools")

    async def write(self, response: Sampled) -> str:
        if not response.text.strip():
            return "Your summary is empty."
        if len(response.text.encode()) > MEMORY_BYTES:
            return f"Your summary has more than {MEMORY_BYTES} bytes."
        return ""

    def fresh(self, opening: Sequence[Message], response: Sampled) -> list[Message]:
        return with_note(opening, HEADING, response)


@register_harness("compaction")
class Compaction:
    """The context is replaced by the policy's own (sampled) summary of it."""

    Config = BoundaryConfig

    def __init__(self, config: BoundaryConfig) -> None:
        self.config = config

    async def run(self, conversation: Conversation) -> None:
        await play(conversation, SummaryMemory(), self.config)

    @staticmethod
    def demonstrate(turn: int, prompt: str) -> str | None:
        """The probe's schedule: summaries are sampled freely."""
        return None if REQUEST in prompt else ""
