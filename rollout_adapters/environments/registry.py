"""The environment protocol and its registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from harness_bridges.engine import Session
from harness_bridges.errors import ConfigError
from harness_bridges.harness import find

ENTRY_POINT_GROUP = "camp_plugin.environments"


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


E = TypeVar("E", bound=type)
_REGISTRY: dict[str, type] = {}


def register_environment(name: str) -> Callable[[E], E]:
    """Class decorator: make an environment selectable as `camp_environment: name`.

    Example::

        @camp_plugin.register_environment("my_env")
        class MyEnv: ...

    Raises:
        ConfigError: the name is taken by another class.
    """

    def register(cls: E) -> E:
        if _REGISTRY.get(name, cls) is not cls:
            raise ConfigError(f"environment {name!r} is already registered: {_REGISTRY[name]}")
        _REGISTRY[name] = cls
        return cls

    return register


def find_environment(name: str) -> type[Environment]:
    """The environment class registered under `name`; an unknown one is a `ConfigError`."""
    import rollout_adapters.environments.search_qa  # noqa: F401

    cls: type[Environment] = find(name, _REGISTRY, ENTRY_POINT_GROUP, "environment")
    return cls
