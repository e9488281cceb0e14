"""The harness protocol and its registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from harness_bridges.conversation import Conversation
from harness_bridges.registry import Registry


class Harness(Protocol):
    """Decides what stays in the agent's context while it works.

    A harness may also have a static `demonstrate(turn, prompt)`, the schedule of the pitfall
    probe: the response of that model call, an empty text where the task's own next step is due
    (`Session.demonstrate`), None where the model shall respond on its own.
    """

    Config: ClassVar[type]
    """Frozen dataclass of the harness's settings; its field names are the flags' names."""

    def __init__(self, config: Any) -> None: ...

    async def run(self, conversation: Conversation) -> None:
        """Play one episode to its end."""
        ...


def _is_harness(item: Any) -> bool:
    return is_dataclass(getattr(item, "Config", None)) and hasattr(item, "run")


HARNESSES = Registry(
    "harness",
    "camp_plugin.harnesses",
    (
        "harness_bridges.search_r1",
        "harness_bridges.tc_rag",
        "harness_bridges.agentfold",
        "harness_bridges.memexrl",
        "harness_bridges.file_memory",
        "harness_bridges.memory_tools",
        "harness_bridges.compaction",
    ),
    _is_harness,
)
H = TypeVar("H", bound=type)


def register_harness(name: str) -> Callable[[H], H]:
    """Class decorator: make a harness selectable as `camp_harness: name`.

    Example::

        @register_harness("keep_last")
        class KeepLast: ...

    Raises:
        ConfigError: the name is taken by another class.
    """
    return lambda cls: HARNESSES.add(name, cls)


def find_harness(name: str) -> type[Harness]:
    """The harness class of that name or dotted path; an unknown one is a `ConfigError`."""
    cls: type[Harness] = HARNESSES.find(name)
    return cls
