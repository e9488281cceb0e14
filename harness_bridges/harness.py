"""The harness protocol and its registry: one dict, plus an entry-point group for third parties."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol, TypeVar

from harness_bridges.conversation import Conversation
from harness_bridges.errors import ConfigError

ENTRY_POINT_GROUP = "camp_plugin.harnesses"


class Harness(Protocol):
    """Decides what stays in the agent's context while it works."""

    Config: ClassVar[type]
    """Frozen dataclass of the harness's settings; its field names are the flags' names."""

    def __init__(self, config: Any) -> None: ...

    async def run(self, conversation: Conversation) -> None:
        """Play one episode to its end."""
        ...


H = TypeVar("H", bound=type)
_REGISTRY: dict[str, type] = {}


def register_harness(name: str) -> Callable[[H], H]:
    """Class decorator: make a harness selectable as `camp_harness: name`.

    Example::

        @register_harness("keep_last")
        class KeepLast: ...

    Raises:
        ConfigError: the name is taken by another class.
    """

    def register(cls: H) -> H:
        if _REGISTRY.get(name, cls) is not cls:
            raise ConfigError(f"harness {name!r} is already registered: {_REGISTRY[name]}")
        _REGISTRY[name] = cls
        return cls

    return register


def find(name: str, registry: Mapping[str, Any], group: str, what: str) -> Any:
    """Look a plugin up: in its registry, as a dotted path, among the installed entry points.

    Raises:
        ConfigError: no such plugin; the message lists what exists and the nearest name.
    """
    if name in registry:
        return registry[name]
    if "." in name:
        return _import(name, what)
    installed = {point.name: point for point in entry_points(group=group)}
    if name in installed:
        return installed[name].load()
    known = sorted({*registry, *installed})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"unknown {what} {name!r}{hint} Known: {', '.join(known)}")


def _import(path: str, what: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} {path!r}: {error}; is its folder on PYTHONPATH?") from None


def find_harness(name: str) -> type[Harness]:
    """The harness class registered under `name`."""
    import harness_bridges.agentfold
    import harness_bridges.search_r1  # noqa: F401

    cls: type[Harness] = find(name, _REGISTRY, ENTRY_POINT_GROUP, "harness")
    return cls
