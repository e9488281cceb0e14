"""The record: `Turn`, `Edit`, `Episode`, and every invariant that they hold.

Turns are the ground truth. The tape, the live views, branches, survivors and leaves are derived
from them (`tape`, `branches`) and never stored beside them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from harness_bridges.errors import RecordError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Span = tuple[int, int]
"""A half-open interval `[start, stop)` of tape positions."""

EDIT_KINDS = ("pop", "fold", "offload", "retrieve", "compact", "replace", "strip")
EDIT_CAUSES = ("policy", "length", "harness", "chat_template")
FINISH_REASONS = ("stop", "length", "abort")
STATUSES = ("completed", "truncated", "aborted", "failed")


_EPISODE_TYPES: dict[str, type] = {
    "rollout_id": int,
    "group_id": int,
    "session_id": str,
    "task_id": str,
    "metadata": Mapping,
}


def _token_ids(value: object, name: str) -> IntArray:
    try:
        array = np.array(value)  # a copy: a validated record shares nothing with its maker
    except ValueError:
        raise RecordError(f"{name}: expected a flat list of token ids, got a ragged one") from None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RecordError(
            f"{name}: expected a flat list of token ids, got shape {array.shape} and dtype "
            f"{array.dtype}; pass the engine's own ids"
        )
    if array.size and int(array.min()) < 0:
        raise RecordError(f"{name}: token id {int(array.min())} is negative; ids start at 0")
    array = array.astype(np.int64)
    array.setflags(write=False)
    return array


def _log_probs(value: object, expected: int, name: str) -> FloatArray:
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"{name}: {error}; every sampled token needs its log-prob, ask the engine for them "
            "(return_logprob)"
        ) from None
    if array.shape != (expected,):
        raise RecordError(
            f"len({name})={array.size}, len(output_ids)={expected}: every sampled token needs "
            "exactly one log-prob, from the same engine response"
        )
    bad = np.flatnonzero(~np.isfinite(array) | (array > 1e-6))
    if bad.size:
        raise RecordError(
            f"{name}[{bad[0]}]={array[bad[0]]}: a log-prob is finite and at most 0; a missing "
            "one must not be filled in"
        )
    array.setflags(write=False)
    return array


def _one_of(value: str, choices: Sequence[str], name: str) -> None:
    if value not in choices:
        raise RecordError(f"{name}={value!r}: expected one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One model call: the live view it was given and what was sampled from it.

    Example: a prompt of three tokens and two sampled ones::

        Turn(prompt_ids=[5, 6, 7], output_ids=[8, 2], output_logprobs=[-0.1, -1.2],
             finish_reason="stop", weight_version="0")

    Raises:
        RecordError: if a field breaks its invariant; the message names field and value.
    """

    prompt_ids: IntArray
    """int64 `[P]`, P >= 1: the engine's own ids of the prompt."""
    output_ids: IntArray
    """int64 `[N]`, N >= 0: the sampled ids, end-of-turn token included if it was sampled."""
    output_logprobs: FloatArray
    """float64 `[N]`: natural log-prob of each sampled token at the sampling temperature."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weight_version: str
    """The engine's name for the weights that sampled this turn."""

    def __post_init__(self) -> None:
        prompt = _token_ids(self.prompt_ids, "prompt_ids")
        if prompt.size == 0:
            raise RecordError("prompt_ids: is empty; the first sampled token has no predecessor")
        output = _token_ids(self.output_ids, "output_ids")
        object.__setattr__(self, "prompt_ids", prompt)
        object.__setattr__(self, "output_ids", output)
        logprobs = _log_probs(self.output_logprobs, output.size, "output_logprobs")
        object.__setattr__(self, "output_logprobs", logprobs)
        _one_of(self.finish_reason, FINISH_REASONS, "finish_reason")
        if not isinstance(self.weight_version, str):
            raise RecordError(f"weight_version={self.weight_version!r}: expected a string")

    @property
    def sequence(self) -> IntArray:
        """int64 `[P+N]`: prompt and output, the path of this turn in the trie."""
        return np.concatenate([self.prompt_ids, self.output_ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One eviction record (J_k, E_k) (002, Appendix E.1) that a white-box bridge asserts.

    Applied to the view before `turn` (its previous prompt and output): the removed spans leave,
    then each inserted span is placed so that it starts at its offset in the edited view. Spans
    at or after `position` are text that the edit itself brought (a stub, a re-rendered turn);
    spans before it came from the tape (a moved summary, a retrieved entry).

    Raises:
        RecordError: if a span is malformed or the kind or cause is unknown.
    """

    turn: int
    """Index of the first turn whose prompt shows the edit, >= 1."""
    position: int
    """J_k: the length of the tape when the edit fired."""
    removed: tuple[Span, ...]
    """E_k: tape spans that left the view, disjoint, each within `[0, position)`."""
    inserted: tuple[tuple[int, Span], ...]
    """`(offset in the edited view, tape span)`, in ascending order of the offset."""
    kind: str
    cause: str

    def __post_init__(self) -> None:
        _one_of(self.kind, EDIT_KINDS, "edit.kind")
        _one_of(self.cause, EDIT_CAUSES, "edit.cause")
        if self.turn < 1:
            raise RecordError(f"edit.turn={self.turn}: the first prompt cannot show an edit")
        for start, stop in self.removed:
            if not 0 <= start < stop <= self.position:
                raise RecordError(
                    f"edit.removed=({start}, {stop}): not within the tape [0, {self.position})"
                )
        ordered = sorted(self.removed)
        for (_, stop), (start, _) in itertools.pairwise(ordered):
            if start < stop:
                raise RecordError(f"edit.removed: spans overlap at tape position {start}")
        offsets = [offset for offset, _ in self.inserted]
        if offsets != sorted(set(offsets)) or any(offset < 0 for offset in offsets):
            raise RecordError(f"edit.inserted: offsets {offsets} are not ascending from 0")
        for _, (start, stop) in self.inserted:
            if not 0 <= start < stop:
                raise RecordError(f"edit.inserted=({start}, {stop}): not a tape span")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """The ordered turns of one agent run; one episode is one rollout for every normalisation.

    `edits` is None where nobody asserted any (a black box): they are then recovered by token
    alignment. Where a bridge asserted them, also none at all, replaying them must reproduce
    every prompt token for token, and a prefix break that no edit covers is an error.

    Raises:
        RecordError: if a field breaks its invariant or the asserted edits do not replay.
    """

    turns: tuple[Turn, ...]
    edits: tuple[Edit, ...] | None = None
    rollout_id: int
    group_id: int
    session_id: str
    task_id: str
    reward: float | None = None
    """The whole episode's reward; its training rows inherit it. None: not graded."""
    turn_rewards: tuple[float, ...] = ()
    """One reward per turn where the environment gives them, else empty."""
    status: str = "completed"
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.turns:
            raise RecordError("turns: is empty; an episode has at least one model call")
        for name, kind in _EPISODE_TYPES.items():
            if not isinstance(getattr(self, name), kind):
                raise RecordError(f"{name}={getattr(self, name)!r}: expected {kind.__name__}")
        if self.reward is not None and not isinstance(self.reward, int | float):
            raise RecordError(f"reward={self.reward!r}: expected a number or None")
        if self.reward is not None and not math.isfinite(self.reward):
            raise RecordError(f"reward={self.reward}: expected a finite number or None")
        if self.turn_rewards and len(self.turn_rewards) != len(self.turns):
            raise RecordError(
                f"len(turn_rewards)={len(self.turn_rewards)}, len(turns)={len(self.turns)}: "
                "give one reward per turn or none"
            )
        if not all(math.isfinite(reward) for reward in self.turn_rewards):
            raise RecordError(f"turn_rewards={self.turn_rewards}: expected finite numbers")
        _one_of(self.status, STATUSES, "status")
        if self.edits is not None:
            from harness_bridges.tape import replay

            replay(self.turns, self.edits)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens over all turns."""
        return sum(turn.output_ids.size for turn in self.turns)
