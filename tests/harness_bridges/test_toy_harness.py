"""A harness of one's own: a class with a decorator, and nothing else anywhere."""

from dataclasses import dataclass

from support.harnesses import World, make, play

from harness_bridges.branches import branches
from harness_bridges.harness import register_harness


@register_harness("keep_last")
class KeepLast:
    """Shows the opening and the last exchanges only."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Settings of `keep_last`."""

        keep_last_exchanges: int = 1
        """Exchanges that stay."""

    def __init__(self, config):
        self.config = config

    async def run(self, conversation):
        head = len(conversation.messages)
        while await conversation.act():
            messages, kept = conversation.messages, 2 * self.config.keep_last_exchanges
            if len(messages) > head + kept:
                conversation.messages = [*messages[:head], *messages[-kept:]]
                conversation.declare_edit("pop", "harness")


def test_it_runs_by_its_name_and_its_record_is_complete():
    texts = ["<search>a</search>"] * 3 + ["<answer>b</answer>"]
    e, prompts = play(make("keep_last"), texts, world=World(["o1", "o2", "o3"]))
    assert "o3" in prompts[3] and "o1" not in prompts[3] and "o2" not in prompts[3]
    assert [x.kind for x in e.edits] == ["pop", "pop"] and len(branches(e.turns)) == 3
