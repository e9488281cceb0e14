"""Branches, walk, survivors and diverging leaves, derived from the turns (002, Appendix B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from harness_bridges.align import common_prefix
from harness_bridges.record import Episode, IntArray, Turn
from harness_bridges.recover import build_tape
from harness_bridges.tape import Tape


@dataclass(frozen=True, slots=True)
class Branch:
    """A maximal run of turns without a junction, `[first, last]` inclusive."""

    first: int
    last: int


def extends(previous: Turn, turn: Turn) -> bool:
    """Whether the turn's prompt begins with all of the previous prompt and output."""
    size = previous.prompt_ids.size
    stop = size + previous.output_ids.size
    prompt = turn.prompt_ids
    return bool(
        prompt.size >= stop
        and np.array_equal(prompt[:size], previous.prompt_ids)
        and np.array_equal(prompt[size:stop], previous.output_ids)
    )


def branches(turns: Sequence[Turn]) -> list[Branch]:
    """The K+1 branches of an episode with K junctions, in order.

    A branch's sequence is its last turn's prompt and output; its targets are the outputs of its
    turns. Every sampled token is a target of exactly one branch.
    """
    starts = [0]
    starts += [i for i in range(1, len(turns)) if not extends(turns[i - 1], turns[i])]
    return [
        Branch(first, stop - 1)
        for first, stop in zip(starts, [*starts[1:], len(turns)], strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Sampled tokens that are still in the walk; entry i of every array is one token."""

    position: IntArray
    """int64 `[S]`: ascending index in the walk."""
    turn: IntArray
    """int64 `[S]`: the turn that sampled it."""
    offset: IntArray
    """int64 `[S]`: its index in that turn's output."""
    diverges: npt.NDArray[np.bool_]
    """bool `[S]`: whether its walk prefix differs from the prefix it was sampled from."""


def survivors(turns: Sequence[Turn], tape: Tape) -> Survivors:
    """The survivors, and which of them are diverging leaves (002, Definition 2).

    Survival is decided by tape identity, divergence by comparing the two prefixes token for
    token.
    """
    walk = tape.positions(len(turns) - 1, output=True)
    position = np.flatnonzero(tape.turn[walk] >= 0)
    turn, offset = tape.turn[walk[position]], tape.offset[walk[position]]
    last = turns[-1].sequence
    live_length = np.array([t.prompt_ids.size for t in turns], dtype=np.int64)[turn] + offset
    agree = np.zeros(len(turns), dtype=np.int64)
    for index in np.unique(turn).tolist():
        agree[index] = common_prefix(last, turns[index].sequence)
    same = (position == live_length) & (position <= agree[turn])
    return Survivors(position, turn, offset, ~same)


def retokenised(turns: Sequence[Turn], decode: Callable[[Sequence[int]], str]) -> int:
    """Junctions at which the text only grew: a client encoded sampled text again, differently.

    Args:
        turns: in order.
        decode: token ids to their exact text.
    """
    count = 0
    for previous, turn in pairwise(turns):
        if not extends(previous, turn):
            before = decode(previous.sequence.tolist())
            count += decode(turn.prompt_ids.tolist()).startswith(before)
    return count


def episode_tape(episode: Episode) -> Tape:
    """The tape of an episode, by its asserted edits or, for a black box, by alignment."""
    return build_tape(episode.turns, episode.edits)


def evicted_fraction(tape: Tape) -> float:
    """c_i of 002 (metric 5): tape tokens that ever left a live view, over all tape tokens."""
    evicted = np.zeros(tape.tokens.size, dtype=np.bool_)
    for edit in tape.edits:
        gone = np.zeros(tape.tokens.size, dtype=np.bool_)
        for start, stop in edit.removed:
            gone[start:stop] = True
        gone[tape.positions(edit.turn)] = False
        evicted |= gone
    return float(evicted.mean()) if evicted.size else 0.0
