"""`sdcc` (002, §5, Eq. 10): the walk, pulled at its diverging leaves toward the live context.

L = L_task(walk) + lambda * sum over leaves of KL( sg P(. | live prefix) || P(. | walk prefix) ).
The teacher is the current policy: its legs are packed as one trie and forwarded without gradient
before each optimizer step. lambda = 0, or no leaf, is `naive_compressed` bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness_bridges.branches import Survivors
from harness_bridges.errors import CampError, ConfigError
from harness_bridges.record import Episode, IntArray
from loss_hooks.host import Batch, HookResult, current_host, need_record, step_records
from loss_hooks.method import Method, register_method
from loss_hooks.policy_loss import Reduce
from loss_hooks.prefix_tree import PrefixTree, build_tree
from loss_hooks.rows import Row, make_row, rollout_log_probs, walk_targets
from loss_hooks.token_stats import Leaves, TeacherRows

NAME = "sdcc"
REDUCTIONS = ("sum", "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class SdccConfig:
    """Settings of SDCC."""

    sdcc_lambda: float = 0.1
    """Weight of the KL after the warm-up."""
    sdcc_warmup_fraction: float = 0.2
    """Share of all update steps over which lambda rises linearly from 0 (002, F.1)."""
    sdcc_reduction: str = "sum"
    """Over the leaves of one rollout: `sum` (Eq. 10) or `mean`. Over rollouts, the host's
    1/global_batch_size as for the task loss."""
    sdcc_max_invalid: float = 0.01
    """Share of leaves whose KL may be non-finite (they are dropped and counted) before the run
    stops."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sdcc_lambda) and self.sdcc_lambda >= 0):
            raise ConfigError(f"sdcc_lambda={self.sdcc_lambda}: must be finite and at least 0")
        for name in ("sdcc_warmup_fraction", "sdcc_max_invalid"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a share in [0, 1]")
        if self.sdcc_reduction not in REDUCTIONS:
            raise ConfigError(f"sdcc_reduction={self.sdcc_reduction!r}: {' or '.join(REDUCTIONS)}")

    @classmethod
    def from_args(cls, args: Any) -> SdccConfig:
        """From a host's argument namespace; keys that it lacks keep their defaults."""
        names = cls.__dataclass_fields__
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def coefficient(config: SdccConfig, update: int, num_updates: int) -> float:
    """lambda at update step `update` (from 0) of `num_updates`."""
    warmup = math.ceil(config.sdcc_warmup_fraction * num_updates)
    return config.sdcc_lambda * (min(1.0, update / warmup) if warmup else 1.0)


def rows(episode: Episode) -> list[Row]:
    """The walk with its survivors, and the live prefixes of its diverging leaves."""
    left = walk_targets(episode)
    log_probs = rollout_log_probs(episode, left)
    record = {"method": NAME, **_legs(episode, left)}
    return [make_row(episode.turns[-1].sequence, left.position, log_probs, record)]


def _legs(episode: Episode, left: Survivors) -> dict[str, Any]:
    """The teacher's packed legs: per leaf, the walk row and the row of the trie."""
    turn, offset = left.turn[left.diverges], left.offset[left.diverges]
    paths: list[IntArray] = []
    teacher_rows = np.empty(turn.size, dtype=np.int64)
    for index in np.unique(turn).tolist():
        last = int(offset[turn == index].max())
        size = episode.turns[index].prompt_ids.size + last
        paths.append(episode.turns[index].sequence[:size])
    tree, located = build_tree(paths)
    for index, path in zip(np.unique(turn).tolist(), located, strict=True):
        mine = turn == index
        teacher_rows[mine] = path[episode.turns[index].prompt_ids.size + offset[mine] - 1]
    return {
        "leaf_rows": (left.position[left.diverges] - 1).tolist(),
        "teacher_rows": teacher_rows.tolist(),
        "tokens": tree.tokens.tolist(),
        "positions": tree.positions.tolist(),
        "parents": tree.parents.tolist(),
        "nodes": tree.nodes.tolist(),
    }


@dataclass(slots=True)
class _Step:
    """What the before-train-step hook leaves for the losses of this optimizer step."""

    config: SdccConfig
    coefficient: float
    teachers: dict[int, TeacherRows]


_current: list[_Step] = []


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    """slime's before-train-step hook: set lambda, run the teacher with the current weights."""
    del optimizer, scheduler
    config = SdccConfig.from_args(args)
    per_rollout = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    update, total = rollout_id * per_rollout + step_id, args.num_rollout * per_rollout
    step = _Step(config, coefficient(config, update, total), {})
    if step.coefficient > 0:
        for tokens, record in step_records(step_id):
            if record["method"] == NAME and record["leaf_rows"]:
                tree, rows_at = _teacher_tree(record)
                step.teachers[id(tokens)] = current_host().teacher_rows(model, tree, rows_at)
    _current[:] = [step]


def _teacher_tree(record: Mapping[str, Any]) -> tuple[PrefixTree, Tensor]:
    names = ("tokens", "positions", "parents", "nodes")
    arrays = [np.asarray(record[name], dtype=np.int64) for name in names]
    return PrefixTree(*arrays), torch.tensor(record["teacher_rows"], dtype=torch.int64)


def loss(args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reduce) -> HookResult:
    """slime's custom loss hook: the walk's policy loss plus the KL at its diverging leaves."""
    if not _current:
        raise CampError("sdcc: the before-train-step hook did not run; set it beside the loss")
    step, host = _current[-1], current_host()
    records = [need_record(tokens, NAME) for tokens in batch["unconcat_tokens"]]
    leaves, weights, means = _gather_leaves(step, batch, records, logits.device)
    task, metrics, kl = host.policy_loss(args, batch, logits, sum_of_sample_mean, leaves)
    invalid = _count_invalid(step.config, kl)
    kl = torch.where(kl.isnan(), 0.0, kl)
    total = task if leaves is None else task + step.coefficient * (weights.to(kl) * kl).sum()
    active = sum(bool(record["leaf_rows"]) for record in records)
    extra = {
        "camp/kl_sdcc": (means.to(kl) * kl).sum().detach(),
        "camp/leaves": float(sum(len(record["leaf_rows"]) for record in records)),
        "camp/leaf_active": float(active),
        "camp/leaf_invalid": float(invalid),
        "camp/lambda": step.coefficient * len(records),
    }
    added = {name: torch.as_tensor(v, device=logits.device) for name, v in extra.items()}
    return total, {**metrics, "loss": total.detach(), **added}


def _gather_leaves(
    step: _Step, batch: Batch, records: Sequence[Mapping[str, Any]], device: torch.device
) -> tuple[Leaves | None, Tensor, Tensor]:
    """The micro-batch's leaves, their weights in the loss, and those of a per-rollout mean."""
    rows_at, teachers, means = [], [], []
    offsets = current_host().row_offsets(batch)
    for tokens, record, start in zip(batch["unconcat_tokens"], records, offsets, strict=True):
        teacher = step.teachers.get(id(tokens))
        if teacher is not None:
            count = len(record["leaf_rows"])
            rows_at.append(torch.tensor(record["leaf_rows"], device=device) + start)
            teachers.append(teacher)
            means.append(torch.full((count,), 1.0 / count, dtype=torch.float64, device=device))
    if not teachers:
        none = torch.zeros(0, dtype=torch.float64, device=device)
        return None, none, none
    hidden = torch.cat([teacher.hidden for teacher in teachers])
    teacher = TeacherRows(hidden, teachers[0].weight, teachers[0].bias)
    mean = torch.cat(means)
    weights = torch.ones_like(mean) if step.config.sdcc_reduction == "sum" else mean
    return Leaves(torch.cat(rows_at), teacher), weights, mean


def _count_invalid(config: SdccConfig, kl: Tensor) -> int:
    invalid = int(kl.isnan().sum())
    if invalid > config.sdcc_max_invalid * kl.numel():
        raise CampError(
            f"sdcc: the KL is not finite at {invalid} of {kl.numel()} leaves (a NaN or masked "
            f"logit row); sdcc_max_invalid={config.sdcc_max_invalid} allows fewer"
        )
    return invalid


SDCC = register_method(
    Method(name=NAME, rows=rows, loss=loss, before_train_step=before_train_step, config=SdccConfig)
)
