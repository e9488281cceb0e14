"""The two naive baselines (002, §3.3): one sequence per episode, whatever its edits were."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from harness_bridges.branches import episode_tape
from harness_bridges.record import Episode
from loss_hooks.host import Batch, HookResult, current_host
from loss_hooks.method import Method, register_method
from loss_hooks.policy_loss import Reduce
from loss_hooks.rows import Row, Targets, make_row, rollout_log_probs, walk_targets


def compressed_rows(episode: Episode) -> list[Row]:
    """The walk H_comp; targets are the survivors (Pitfall A: they saw more than it holds)."""
    left = walk_targets(episode)
    log_probs = rollout_log_probs(episode, left)
    return [make_row(episode.turns[-1].sequence, left.position, log_probs)]


def full_rows(episode: Episode) -> list[Row]:
    """The tape H_T; targets are all sampled tokens (Pitfall B: later ones saw less than that)."""
    tape = episode_tape(episode)
    index = np.flatnonzero(tape.turn >= 0)
    log_probs = rollout_log_probs(episode, Targets(tape.turn[index], tape.offset[index]))
    return [make_row(tape.tokens, index, log_probs)]


def policy_loss(args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reduce) -> HookResult:
    """slime's custom loss hook: the host's own policy loss on the rows as they are."""
    loss, metrics, _ = current_host().policy_loss(args, batch, logits, sum_of_sample_mean, None)
    return loss, metrics


NAIVE_COMPRESSED = register_method(
    Method(name="naive_compressed", rows=compressed_rows, loss=policy_loss)
)
NAIVE_FULL = register_method(Method(name="naive_full", rows=full_rows, loss=policy_loss))
