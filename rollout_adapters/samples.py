"""Episodes to training samples, rewards to advantages: the rollout side of slime's contract."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness_bridges.errors import CampError
from harness_bridges.record import Episode
from loss_hooks.method import Method
from loss_hooks.postprocess import CARRIER


@dataclass(slots=True, kw_only=True)
class Sample:
    """One training row, with the attribute names of slime's `Sample`."""

    index: int
    group_index: int
    rollout_id: int | None
    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    reward: float
    truncated: bool
    weight_versions: list[str]
    prompt: str = ""
    """The method's record as JSON, or empty."""


class SampleLike(Protocol):
    """What the reward hook reads of a sample, ours or slime's."""

    @property
    def group_index(self) -> int | None: ...

    @property
    def rollout_id(self) -> int | None: ...

    @property
    def reward(self) -> Any: ...


def episode_samples(episode: Episode, method: Method, first_index: int = 0) -> list[Sample]:
    """The rows that `method` makes of an episode; each inherits the whole reward.

    Raises:
        CampError: nothing was sampled, or the episode was never graded.
    """
    where = f"episode {episode.rollout_id} (task {episode.task_id!r})"
    if episode.num_sampled == 0:
        raise CampError(f"{where}: has no sampled token; drop it before training")
    if episode.reward is None:
        raise CampError(f"{where}: reward is None; grade it before training")
    return [
        Sample(
            index=first_index + i,
            group_index=episode.group_id,
            rollout_id=episode.rollout_id,
            tokens=row.tokens.tolist(),
            response_length=row.loss_mask.size,
            loss_mask=row.loss_mask.tolist(),
            rollout_log_probs=row.rollout_log_probs.tolist(),
            reward=episode.reward,
            truncated=episode.status == "truncated",
            weight_versions=[turn.weight_version for turn in episode.turns],
            prompt="" if row.record is None else json.dumps(row.record),
        )
        for i, row in enumerate(method.rows(episode))
    ]


def _reward(args: Any, sample: SampleLike) -> float:
    # slime's samples may carry several rewards, of which `--reward-key` names one.
    select = getattr(sample, "get_reward_value", None)
    return float(sample.reward if select is None else select(args))


def _rollout_key(sample: SampleLike, position: int) -> Hashable:
    # Rows without an id are rollouts of their own; they must not collapse into one.
    return ("row", position) if sample.rollout_id is None else sample.rollout_id


def post_process_rewards(
    args: Any, samples: Sequence[SampleLike]
) -> tuple[list[float], list[float]]:
    """slime's reward-post-process hook: GRPO advantages over *episodes*, not rows.

    Each rollout counts once in its group's mean and (unbiased) standard deviation, however many
    rows it became; slime's default pools the whole batch when the row count differs.

    Args:
        args: reads `grpo_std_normalization`.
        samples: all rows of a rollout step.

    Returns:
        Raw and normalised reward per row. A group of one rollout gets 0.

    Raises:
        CampError: rows of one rollout with different rewards or groups, or a non-finite reward.
    """
    groups: dict[Hashable, dict[Hashable, float]] = {}
    for position, sample in enumerate(samples):
        key, reward = _rollout_key(sample, position), _reward(args, sample)
        if not math.isfinite(reward):
            raise CampError(f"rollout {key}: reward={reward} is not finite; grade it again")
        group = groups.setdefault(("group", sample.group_index), {})
        if group.setdefault(key, reward) != reward:
            raise CampError(
                f"rollout {key}: its rows have rewards {group[key]} and {reward}; the rows of one "
                "rollout share one reward"
            )
    if sum(map(len, groups.values())) != len({k for group in groups.values() for k in group}):
        raise CampError("group_index: rows of one rollout are in different groups")
    scaled = {
        key: value
        for group in groups.values()
        for key, value in _normalise(group, args.grpo_std_normalization).items()
    }
    keys = [_rollout_key(sample, position) for position, sample in enumerate(samples)]
    return [_reward(args, sample) for sample in samples], [scaled[key] for key in keys]


def _normalise(group: dict[Hashable, float], use_std: bool) -> dict[Hashable, float]:
    mean = math.fsum(group.values()) / len(group)
    centred = {key: reward - mean for key, reward in group.items()}
    if not use_std or len(group) < 2:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred.values()) / (len(group) - 1))
    return {key: value / (std + 1e-6) for key, value in centred.items()}


def convert_samples_to_train_data(args: Any, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """slime's convert-samples-to-train-data hook: lists per row, records in the carrier.

    `rollout_mask_sums` is the whole rollout's number of targets on every one of its rows, so
    that each rollout is one token-weighted mean wherever its rows land.

    Raises:
        CampError: a row whose lists differ in length, or an empty batch.
    """
    if not samples:
        raise CampError("samples: is empty; there is nothing to train on")
    for sample in samples:
        _check(sample)
    raw, rewards = post_process_rewards(args, samples)
    keys = [_rollout_key(sample, position) for position, sample in enumerate(samples)]
    totals: dict[Hashable, int] = {}
    for key, sample in zip(keys, samples, strict=True):
        totals[key] = totals.get(key, 0) + sum(sample.loss_mask)
    ids = {key: number for number, key in enumerate(totals)}
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [int(sample.truncated) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [ids[key] for key in keys],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_mask_sums": [totals[key] for key in keys],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        CARRIER: [sample.prompt for sample in samples],
    }


def _check(sample: Sample) -> None:
    lengths = {
        "loss_mask": len(sample.loss_mask),
        "rollout_log_probs": len(sample.rollout_log_probs),
    }
    for name, length in lengths.items():
        if length != sample.response_length:
            raise CampError(
                f"sample {sample.index}: len({name})={length}, "
                f"response_length={sample.response_length}; every response token has one entry"
            )
    if not 0 < sample.response_length < len(sample.tokens):
        raise CampError(
            f"sample {sample.index}: response_length={sample.response_length} of "
            f"{len(sample.tokens)} tokens; both prompt and response need at least one"
        )
