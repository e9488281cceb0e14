"""Named plugins: built-in ones, registered ones, installed ones, and dotted paths."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from harness_bridges.errors import ConfigError

T = TypeVar("T")


class Registry:
    """One kind of plugin.

    Args:
        what: the kind, for messages.
        group: entry-point group of third-party packages.
        built_in: modules that register the built-in ones when they are imported.
        valid: whether an object is such a plugin.
    """

    def __init__(
        self, what: str, group: str, built_in: tuple[str, ...], valid: Callable[[Any], bool]
    ) -> None:
        self._what, self._group, self._built_in, self._valid = what, group, built_in, valid
        self._items: dict[str, Any] = {}

    def add(self, name: str, item: T) -> T:
        """Register `item` under `name`.

        Raises:
            ConfigError: the name is taken by another object, or `item` is no such plugin.
        """
        if not self._valid(item):
            raise ConfigError(f"{self._what} {name!r}: {item!r} is no {self._what}")
        if self._items.get(name, item) is not item:
            raise ConfigError(f"{self._what} {name!r} is already registered: {self._items[name]}")
        self._items[name] = item
        return item

    def __iter__(self) -> Iterator[Any]:
        """The built-in and registered ones."""
        for module in self._built_in:
            import_module(module)
        return iter(list(self._items.values()))

    def names(self) -> list[str]:
        """Names of the built-in and registered ones."""
        list(self)
        return list(self._items)

    def find(self, name: object) -> Any:
        """By name, by dotted path, or among the installed entry points.

        Raises:
            ConfigError: no such plugin (the message lists what exists and the nearest name), or
                it cannot be imported, or it is something else.
        """
        if not isinstance(name, str):
            raise ConfigError(f"{self._what} {name!r}: expected a name or a dotted path")
        for module in self._built_in:
            import_module(module)
        installed = {point.name: point for point in entry_points(group=self._group)}
        if name in self._items:
            return self._items[name]
        if name in installed:
            return self._checked(name, installed[name])
        if "." in name:
            module, _, attribute = name.rpartition(".")
            point = EntryPoint(name, f"{module}:{attribute}", self._group)
            return self._checked(name, point)
        known = sorted({*self._items, *installed})
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"unknown {self._what} {name!r}{hint} Known: {', '.join(known)}")

    def _checked(self, name: str, point: EntryPoint) -> Any:
        try:
            item = point.load()
        except Exception as error:
            raise ConfigError(
                f"{self._what} {name!r}: {type(error).__name__}: {error}; it cannot be imported "
                f"from {point.value}"
            ) from error
        if not self._valid(item):
            raise ConfigError(f"{self._what} {name!r}: {point.value} is no {self._what}")
        return item
