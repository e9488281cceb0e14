"""The clipped policy loss, as slime's `policy_loss` computes it, on flat tensors.

Shapes: N loss tokens. Everything under a zero mask is replaced before any arithmetic, so that a
NaN there reaches neither value nor gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness_bridges.errors import ConfigError

Reduce = Callable[[Tensor], Tensor]
"""slime's `sum_of_sample_mean`: per-token values to a scalar, one token mean per rollout."""

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """slime's flags of the same names. Defaults: 002, F.1."""

    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float | None = None
    """Dual clip: bound on the ratio for negative advantages, > 1. None: off, as in slime."""
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    use_tis: bool = False
    """Truncated importance sampling: weight each token by the *old* trainer policy over the
    engine's, clipped to `[tis_clip_low, tis_clip]`."""
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eps_clip < 1:
            raise ConfigError(f"eps_clip={self.eps_clip}: expected 0 <= eps_clip < 1")
        if self.eps_clip_high < 0:
            raise ConfigError(f"eps_clip_high={self.eps_clip_high}: must not be negative")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            raise ConfigError(f"eps_clip_c={self.eps_clip_c}: dual clip needs a bound above 1")
        if self.kl_loss_type not in KL_TYPES:
            raise ConfigError(f"kl_loss_type={self.kl_loss_type!r}: one of {', '.join(KL_TYPES)}")
        if not 0 <= self.tis_clip_low < self.tis_clip:
            raise ConfigError(
                f"tis_clip_low={self.tis_clip_low}, tis_clip={self.tis_clip}: expected "
                "0 <= tis_clip_low < tis_clip"
            )

    @classmethod
    def from_args(cls, args: Any) -> PolicyLossConfig:
        """From a host's argument namespace; slime's `eps_clip_high` None means `eps_clip`."""
        high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
        return cls(
            eps_clip=args.eps_clip,
            eps_clip_high=high,
            eps_clip_c=args.eps_clip_c,
            use_kl_loss=args.use_kl_loss,
            kl_loss_coef=args.kl_loss_coef,
            kl_loss_type=args.kl_loss_type,
            entropy_coef=args.entropy_coef,
            use_tis=args.use_tis,
            tis_clip=args.tis_clip,
            tis_clip_low=args.tis_clip_low,
        )


class PolicyTerms(NamedTuple):
    """Per-token parts of the loss, all `[N]`."""

    pg_loss: Tensor
    pg_clipfrac: Tensor
    ppo_kl: Tensor
    kl_loss: Tensor
    tis: Tensor
    """Importance weight before clipping; 1 where TIS is off."""


def policy_terms(
    config: PolicyLossConfig,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
) -> PolicyTerms:
    """Clipped surrogate with optional dual clip, and the KL estimate to a reference.

    Args:
        config: clipping and KL settings.
        log_probs: `[N]`, current policy, with gradient.
        old_log_probs: `[N]`, the denominator of the ratio.
        advantages: `[N]`.
        mask: bool `[N]`; where False every term is 0 whatever the inputs hold.
        ref_log_probs: `[N]` of the reference policy; needed if `use_kl_loss`.
        rollout_log_probs: `[N]` of the engine; needed if `use_tis`.
    """
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    log_probs = torch.where(mask, log_probs, zero)
    old = torch.where(mask, old_log_probs.to(log_probs.dtype), zero)
    advantages = torch.where(mask, advantages.to(log_probs.dtype), zero)
    ppo_kl = old - log_probs
    ratio = (-ppo_kl).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_high) * advantages
    pg_loss = torch.maximum(unclipped, clipped)
    if config.eps_clip_c is not None:
        bounded = torch.minimum(-config.eps_clip_c * advantages, pg_loss)
        pg_loss = torch.where(advantages < 0, bounded, pg_loss)
    kl_loss = torch.zeros_like(pg_loss)
    if config.use_kl_loss:
        if ref_log_probs is None:
            raise ConfigError("use_kl_loss is set, but the batch has no ref_log_probs")
        ref = torch.where(mask, ref_log_probs.to(log_probs.dtype), zero)
        kl_loss = approx_kl(log_probs, ref, config.kl_loss_type)
    tis = torch.ones_like(pg_loss)
    if config.use_tis:
        if rollout_log_probs is None:
            raise ConfigError("use_tis is set, but the batch has no rollout_log_probs")
        rollout = torch.where(mask, rollout_log_probs.to(log_probs.dtype), zero)
        tis = (old - rollout).detach().exp()
        pg_loss = pg_loss * tis.clamp(config.tis_clip_low, config.tis_clip)
    clipfrac = (clipped > unclipped).to(pg_loss.dtype)
    return PolicyTerms(pg_loss, clipfrac, ppo_kl, kl_loss, tis)


def approx_kl(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from sampled tokens, `[N]`.

    k1, k2, k3 are Schulman's estimators; `low_var_kl` is k3 clamped to ±10.
    """
    log_ratio = log_probs - ref_log_probs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return k3.clamp(-10, 10) if kind == "low_var_kl" else k3


def reduce_policy_terms(
    config: PolicyLossConfig, terms: PolicyTerms, entropy: Tensor, reduce: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar loss and slime's metrics of the same names, always the same keys.

    Args:
        entropy: `[N]`.
        reduce: the host's reducer.
    """
    pg_loss, entropy_loss = reduce(terms.pg_loss), reduce(entropy)
    loss = pg_loss - config.entropy_coef * entropy_loss
    kl_loss = reduce(terms.kl_loss)
    if config.use_kl_loss:
        loss = loss + config.kl_loss_coef * kl_loss
    metrics = {
        "loss": loss,
        "pg_loss": pg_loss,
        "entropy_loss": entropy_loss,
        "pg_clipfrac": reduce(terms.pg_clipfrac),
        "ppo_kl": reduce(terms.ppo_kl),
        "kl_loss": kl_loss,
        "tis": reduce(terms.tis),
    }
    return loss, {name: value.detach() for name, value in metrics.items()}
