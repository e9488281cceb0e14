"""camp_plugin: train language-model agents on the contexts they really saw.

The facade. Every public name resolves lazily (PEP 562), so that `import camp_plugin` costs
milliseconds and loads neither torch nor a host, and so that a host's
`getattr(import_module("camp_plugin"), "sdcc")` finds the loss hook.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    # loss hooks: fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)
    "naive_compressed": ("loss_hooks.naive", "policy_loss"),
    "naive_full": ("loss_hooks.naive", "policy_loss"),
    "logit_tree": ("loss_hooks.naive", "policy_loss"),
    "packed_mask": ("loss_hooks.packed_mask", "loss"),
    "sdcc": ("loss_hooks.sdcc", "loss"),
    # the hooks around them
    "sdcc_before_train_step": ("loss_hooks.sdcc", "before_train_step"),
    "rollout_data_postprocess": ("loss_hooks.postprocess", "rollout_data_postprocess"),
    "convert_samples_to_train_data": (
        "rollout_adapters.samples",
        "convert_samples_to_train_data",
    ),
    "post_process_rewards": ("rollout_adapters.samples", "post_process_rewards"),
    # registration
    "register_harness": ("harness_bridges.harness", "register_harness"),
    "register_environment": ("rollout_adapters.environments.registry", "register_environment"),
    "register_method": ("loss_hooks.method", "register_method"),
    # the record
    "Episode": ("harness_bridges.record", "Episode"),
    "Turn": ("harness_bridges.record", "Turn"),
    "Edit": ("harness_bridges.record", "Edit"),
    "CampError": ("harness_bridges.errors", "CampError"),
    "read_episodes": ("harness_bridges.store", "read_episodes"),
    "append_episode": ("harness_bridges.store", "append_episode"),
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'camp_plugin' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
