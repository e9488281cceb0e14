"""`search_r1`: the no-edit control. The context only grows."""

from __future__ import annotations

from dataclasses import dataclass

from harness_bridges.conversation import Conversation
from harness_bridges.harness import register_harness


@register_harness("search_r1")
class SearchR1:
    """ReAct loop without an editor: H_comp equals H_T, its drift is the numerical floor."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """No settings."""

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(self, conversation: Conversation) -> None:
        while await conversation.act():
            pass
