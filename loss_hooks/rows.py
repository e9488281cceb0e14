"""Training rows: what a method makes of an episode, in the shape that slime trains on.

L tokens, the last R of them the response; entry t of a response list belongs to token
`prompt_length + t`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness_bridges.branches import Survivors, episode_tape, survivors
from harness_bridges.errors import CampError
from harness_bridges.record import Episode, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Row:
    """One sequence to forward, and which of its tokens are trained.

    Example: a turn with prompt `1 2` and output `3 4`, extended by prompt `1 2 3 4 5` with
    output `6`, is one row: tokens `1 2 3 4 5 6`, prompt_length 2, loss_mask `1 1 0 1`.
    """

    tokens: IntArray
    """int64 `[L]`."""
    prompt_length: int
    """Tokens before the first trained one, 1 <= prompt_length < L."""
    loss_mask: IntArray
    """int64 `[R]`: how many targets this token is; 0 for context."""
    rollout_log_probs: FloatArray
    """float64 `[R]`: as the engine reported them; NaN where nothing is trained, since 0 would
    read as probability one."""
    record: Mapping[str, Any] | None = None
    """What the loss hook needs beyond the row, JSON values only."""


def make_row(
    tokens: IntArray,
    index: IntArray,
    log_probs: FloatArray,
    record: Mapping[str, Any] | None = None,
) -> Row:
    """A row from its targets.

    Args:
        tokens: int64 `[L]`.
        index: int64 `[M]`: which tokens are targets; one named twice is two targets.
        log_probs: float64 `[M]`: their rollout log-probs; targets of one token give their mean.
        record: see `Row`.

    Raises:
        CampError: a target without a predecessor, or fewer than two tokens.
    """
    if tokens.size < 2 or (index.size and int(index.min()) < 1):
        raise CampError(
            f"a row of {tokens.size} tokens with a target at {index.min(initial=tokens.size)}: "
            "a target needs a token before it"
        )
    first = int(index.min()) if index.size else tokens.size - 1
    slots = index - first
    size = tokens.size - first
    mask = np.bincount(slots, minlength=size).astype(np.int64)
    sums = np.bincount(slots, weights=log_probs, minlength=size)
    means = np.divide(sums, mask, out=np.full(size, np.nan), where=mask > 0)
    return Row(
        tokens=tokens,
        prompt_length=first,
        loss_mask=mask,
        rollout_log_probs=means,
        record=record,
    )


class SampledTokens(Protocol):
    """Sampled tokens of an episode by turn and offset, int64 `[M]` both."""

    @property
    def turn(self) -> IntArray: ...

    @property
    def offset(self) -> IntArray: ...


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Chosen `SampledTokens`."""

    turn: IntArray
    offset: IntArray


def walk_targets(episode: Episode) -> Survivors:
    """The survivors that a walk can score: one at its head has no token before it."""
    left = survivors(episode.turns, episode_tape(episode))
    keep = left.position > 0
    return Survivors(left.position[keep], left.turn[keep], left.offset[keep], left.diverges[keep])


def rollout_log_probs(episode: Episode, targets: SampledTokens) -> npt.NDArray[np.float64]:
    """float64 `[M]`: the engine's log-probs of the targets."""
    starts = np.cumsum([0, *(turn.output_ids.size for turn in episode.turns)])
    flat = np.concatenate([turn.output_logprobs for turn in episode.turns])
    return flat[starts[targets.turn] + targets.offset]
