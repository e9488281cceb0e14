"""The method protocol and its registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from harness_bridges.record import Episode
from harness_bridges.registry import Registry
from loss_hooks.host import HookResult
from loss_hooks.policy_loss import Reduce
from loss_hooks.rows import Row


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


METHODS = Registry(
    "method",
    "camp_plugin.methods",
    ("loss_hooks.naive", "loss_hooks.logit_tree", "loss_hooks.packed_mask", "loss_hooks.sdcc"),
    lambda item: isinstance(item, Method),
)


def register_method(method: Method) -> Method:
    """Make a method selectable as `camp_method: name`.

    Raises:
        ConfigError: the name is taken by another method.
    """
    return METHODS.add(method.name, method)


def find_method(name: str) -> Method:
    """The method of that name or dotted path; an unknown one is a `ConfigError`."""
    method: Method = METHODS.find(name)
    return method
