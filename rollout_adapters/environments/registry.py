"""The environment protocol and its registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from harness_bridges.engine import Session
from harness_bridges.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to do; `payload` is the environment's own."""

    task_id: str
    split: str
    payload: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """A family of tasks and the world that they are done in."""

    Config: ClassVar[type]
    """Frozen dataclass of its settings; the field names are flags."""

    def __init__(self, config: Any) -> None: ...

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split (`train` or `test`), in a fixed order."""
        ...

    def start(self, task: Task) -> Session:
        """Begin an episode."""
        ...


def _is_environment(item: Any) -> bool:
    return is_dataclass(getattr(item, "Config", None)) and hasattr(item, "start")


ENVIRONMENTS = Registry(
    "environment",
    "camp_plugin.environments",
    ("rollout_adapters.environments.search_qa",),
    _is_environment,
)
E = TypeVar("E", bound=type)


def register_environment(name: str) -> Callable[[E], E]:
    """Class decorator: make an environment selectable as `camp_environment: name`.

    Example::

        @camp_plugin.register_environment("my_env")
        class MyEnv: ...

    Raises:
        ConfigError: the name is taken by another class.
    """
    return lambda cls: ENVIRONMENTS.add(name, cls)


def find_environment(name: str) -> type[Environment]:
    """The environment class of that name or dotted path; an unknown one is a `ConfigError`."""
    cls: type[Environment] = ENVIRONMENTS.find(name)
    return cls
