"""The method protocol and its registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from harness_bridges.errors import ConfigError
from harness_bridges.harness import find
from harness_bridges.record import Episode
from loss_hooks.host import HookResult
from loss_hooks.policy_loss import Reduce
from loss_hooks.rows import Row

ENTRY_POINT_GROUP = "camp_plugin.methods"


@dataclass(frozen=True, slots=True)
class NoConfig:
    """A method without settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Under which prefix tokens are scored: rows plus loss."""

    name: str
    rows: Callable[[Episode], Sequence[Row]]
    """An episode's training rows; all of them are one rollout."""
    loss: Callable[[Any, Any, Tensor, Reduce], HookResult]
    """slime's custom loss hook."""
    before_train_step: Callable[[Any, int, int, Any, Any, Any], None] | None = None
    """slime's before-train-step hook, if the method needs one."""
    config: type = field(default=NoConfig)
    """Dataclass of the method's settings; field names are flags."""


_REGISTRY: dict[str, Method] = {}


def register_method(method: Method) -> Method:
    """Make a method selectable as `camp_method: name`.

    Raises:
        ConfigError: the name is taken by another method.
    """
    if _REGISTRY.get(method.name, method) is not method:
        raise ConfigError(f"method {method.name!r} is already registered")
    _REGISTRY[method.name] = method
    return method


def find_method(name: str) -> Method:
    """The method registered under `name`; an unknown one is a `ConfigError`."""
    import loss_hooks.logit_tree
    import loss_hooks.naive
    import loss_hooks.packed_mask
    import loss_hooks.sdcc  # noqa: F401

    method: Method = find(name, _REGISTRY, ENTRY_POINT_GROUP, "method")
    return method
