"""Settings of the embedded host. Keys are slime's flags where slime has one.

The settings of harness, environment and method are declared beside them; a key that nobody
declares stops the run before any work, with the nearest valid name.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from harness_bridges.errors import ConfigError
from harness_bridges.harness import HARNESSES, find_harness
from loss_hooks.method import METHODS, find_method
from loss_hooks.policy_loss import PolicyLossConfig
from rollout_adapters.environments.registry import ENVIRONMENTS, find_environment
from rollout_adapters.sandbox.config import SandboxConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """What the embedded host itself reads."""

    hf_checkpoint: str
    """Local Hugging Face model directory, or `smollm2` for the packaged one."""
    run_name: str = "run"
    """Results go to `runs/<run_name>/`."""
    runs_dir: str = "runs"
    # three independent switches
    camp_harness: str = "agentfold"
    camp_method: str = "sdcc"
    camp_environment: str = "search_qa"
    # rollout
    num_rollout: int = 1
    rollout_batch_size: int = 2
    """Prompts per rollout step."""
    n_samples_per_prompt: int = 4
    global_batch_size: int = 8
    """Rollouts (episodes) per optimizer step."""
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    rollout_max_response_len: int = 64
    rollout_max_context_len: int = 4096
    camp_max_turns: int = 30
    load_debug_rollout_data: str | None = None
    """Train on these stored episodes instead of sampling new ones."""
    # training
    max_tokens_per_gpu: int = 2048
    """Token budget of one micro-batch; a longer row runs alone."""
    lr: float = 1e-6
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    advantage_estimator: str = "grpo"
    grpo_std_normalization: bool = True
    use_rollout_logprobs: bool = False
    ref_load: str | None = None
    """Model directory of the reference policy for the KL loss; default: `hf_checkpoint`."""
    save: str | None = None
    """Checkpoint directory; default `runs/<run_name>/checkpoint`."""
    save_interval: int = 1
    """Rollout steps between checkpoints."""
    seed: int = 1234
    cpu_threads: int | None = None
    """Torch threads; default: torch's own choice."""

    def __post_init__(self) -> None:
        positive = (
            "num_rollout rollout_batch_size n_samples_per_prompt global_batch_size "
            "rollout_max_response_len rollout_max_context_len camp_max_turns max_tokens_per_gpu "
            "save_interval"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ConfigError(f"cpu_threads={self.cpu_threads}: must be at least 1")
        for name in ("lr", "weight_decay", "clip_grad"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must not be negative")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 0 <= {name} < 1")
        if self.rollout_temperature <= 0:
            raise ConfigError(
                f"rollout_temperature={self.rollout_temperature}: must be above 0; greedy "
                "decoding is not a policy that can be trained on"
            )
        if self.rollout_top_p != 1.0 or self.rollout_top_k != -1:
            raise ConfigError(
                f"rollout_top_p={self.rollout_top_p}, rollout_top_k={self.rollout_top_k}: a cut "
                "sampler draws from another distribution than the one whose log-probs are "
                "trained, which biases every ratio; leave them at 1.0 and -1"
            )
        if self.advantage_estimator != "grpo":
            raise ConfigError(f"advantage_estimator={self.advantage_estimator!r}: only grpo")
        episodes = self.rollout_batch_size * self.n_samples_per_prompt
        if episodes % self.global_batch_size:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size}: must divide rollout_batch_size * "
                f"n_samples_per_prompt = {episodes}, or the last episodes would not be trained"
            )


class UnusedSettingWarning(UserWarning):
    """A setting of a component that this run does not use."""


def _component_configs(values: Mapping[str, Any]) -> list[type]:
    defaults = {f.name: f.default for f in fields(LocalConfig)}
    names = {**defaults, **values}
    harness = find_harness(names["camp_harness"])
    method = find_method(names["camp_method"])
    environment = find_environment(names["camp_environment"])
    chosen = [harness.Config, method.config, environment.Config]
    return [LocalConfig, PolicyLossConfig, SandboxConfig, *chosen]


def _all_configs() -> list[type]:
    """The settings of every registered component, used or not."""
    found = [item.Config for registry in (HARNESSES, ENVIRONMENTS) for item in registry]
    return [*found, *(method.config for method in METHODS)]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> SimpleNamespace:
    """Read a YAML file and `key=value` overrides into one checked namespace.

    Raises:
        ConfigError: unknown key, wrong type, or settings that cannot work together.
    """
    return build_config(read_values(path, overrides))


def read_values(path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The raw settings of a YAML file with `key=value` overrides on top."""
    values: dict[str, Any] = {} if path is None else _read_yaml(Path(path))
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item}: expected key=value")
        try:
            values[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set {item}: the value is not valid YAML; quote it") from None
    return values


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: expected a mapping of keys to values")
    return loaded


def build_config(values: Mapping[str, Any]) -> SimpleNamespace:
    """All settings as one namespace, as slime's hooks get them, defaults filled in.

    A setting of a component that is not chosen (`sdcc_lambda` with another method) has no effect
    and is named in an `UnusedSettingWarning`.
    """
    components = _component_configs(values)
    used = {name for cls in components for name in _types(cls)}
    known = used | {name for cls in _all_configs() for name in _types(cls)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown setting {key!r}{hint} All settings: docs/settings.md")
    unused = [key for key in values if key not in used]
    if unused:
        text = f"{', '.join(unused)}: no effect with this harness, method and environment"
        warnings.warn(text, UnusedSettingWarning, stacklevel=2)
    merged: dict[str, Any] = {}
    for cls in components:
        mine = {k: _coerce(k, values[k], t) for k, t in _types(cls).items() if k in values}
        merged.update(_built(cls, mine))
    if merged["use_tis"] and merged["use_rollout_logprobs"]:
        raise ConfigError(
            "use_tis with use_rollout_logprobs: the ratio already has the engine's log-probs, "
            "the weight would count the mismatch twice; set one of them"
        )
    return SimpleNamespace(**merged)


def _built(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    missing = [
        f.name
        for f in fields(cls)
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: is required; set it in the file or with --set")
    built = cls(**values)
    return {name: getattr(built, name) for name in _types(cls)}


def component_config(cls: type, args: Any) -> Any:
    """A component's own config object out of the merged namespace."""
    return cls(**{name: getattr(args, name) for name in _types(cls)})


def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _coerce(key: str, value: Any, expected: Any) -> Any:
    options = typing.get_args(expected) if isinstance(expected, types.UnionType) else (expected,)
    names = " or ".join(t.__name__ for t in options)
    if isinstance(value, bool) and bool not in options:
        options = ()
    if str in options and isinstance(value, int | float):
        return str(value)  # run_name=7 is a number to YAML
    if float in options and isinstance(value, int | float | str):
        try:
            value = float(value)  # 1e-6 is a string to YAML
        except ValueError:
            pass
        else:
            if not math.isfinite(value):
                raise ConfigError(f"{key}={value}: must be finite")
    if isinstance(value, options):
        return value
    raise ConfigError(f"{key}={value!r}: expected {names}")
