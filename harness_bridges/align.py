"""Token alignment of two consecutive views: which tokens of the new one are old tokens.

The common prefix is kept, then the end of the old view, what was sampled last, is looked for: most
edits leave it and the text before it as they were. Then runs of at least `min_run` equal tokens are
matched greedily, wherever they lie in the old view (a fold moves a summary in front of older text).
Windows are compared by hash through one sort, so the cost is O(n log n) for any pair of views.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness_bridges.record import IntArray

_MAX_CANDIDATES = 16  # repeated text: looking at more occurrences finds no better run
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Match:
    """`new[new : new + length]` are the tokens `old[old : old + length]`."""

    new: int
    old: int
    length: int


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Number of leading tokens in which `a` and `b` agree."""
    n = min(a.size, b.size)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


def window_hashes(tokens: IntArray, width: int) -> npt.NDArray[np.uint64]:
    """uint64 `[len(tokens) - width + 1]`: a hash of every window of `width` tokens."""
    count = tokens.size - width + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    unsigned = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(count, dtype=np.uint64)
    for shift in range(width):
        hashes = (hashes ^ unsigned[shift : shift + count]) * _HASH_FACTOR
        hashes ^= hashes >> np.uint64(29)
    return hashes


def align(old: IntArray, new: IntArray, *, min_run: int) -> list[Match]:
    """Match the tokens of `new` with those of `old`, each old token at most once.

    Args:
        old: int64 `[A]`, the previous prompt and output.
        new: int64 `[B]`, the next prompt.
        min_run: shortest run, after the common prefix, that counts as the same tokens. Short
            runs ("of the") recur by chance and must not pass for survivors.

    Returns:
        Matches in ascending order of `new`; adjacent ones are not contiguous in both views.
    """
    prefix = common_prefix(old, new)
    matches = [Match(0, 0, prefix)] if prefix else []
    if prefix < min(old.size, new.size):
        rest = _Rest(old, new, prefix, min_run)
        end = rest.find_end()
        matches += rest.match(prefix, end.new if end else new.size)
        matches += [end, *rest.match(end.new + end.length, new.size)] if end else []
        matches += _match_tail(old, new, matches, min_run)
    return matches


def _match_tail(old: IntArray, new: IntArray, matches: list[Match], min_run: int) -> list[Match]:
    """A run at the very end of `old` that goes on right where the last match stopped.

    That is a span cut out in one piece ("<think>...</think>" before a short answer). Two tokens
    are enough there, since their place is no coincidence.
    """
    old_done = max((match.old + match.length for match in matches), default=0)
    new_done = max((match.new + match.length for match in matches), default=0)
    longest = min(min_run - 1, old.size - old_done, new.size - new_done)
    for length in range(longest, 1, -1):
        if np.array_equal(old[old.size - length :], new[new_done : new_done + length]):
            return [Match(new_done, old.size - length, length)]
    return []


class _Rest:
    """What follows the common prefix."""

    def __init__(self, old: IntArray, new: IntArray, prefix: int, min_run: int) -> None:
        self.old, self.new, self.prefix, self.min_run = old, new, prefix, min_run
        self.old_hashes = window_hashes(old[prefix:], min_run)
        self.new_hashes = window_hashes(new[prefix:], min_run)
        self.order = np.argsort(self.old_hashes, kind="stable")
        self.ranked = self.old_hashes[self.order]
        self.left = np.searchsorted(self.ranked, self.new_hashes, side="left")
        self.used = np.zeros(old.size, dtype=np.bool_)
        self.used[:prefix] = True

    def find_end(self) -> Match | None:
        """The longest run of `new` that the old view ends with."""
        if not self.old_hashes.size:
            return None
        best: Match | None = None
        starts = np.flatnonzero(self.new_hashes == self.old_hashes[-1])[-_MAX_CANDIDATES:]
        for start in starts.tolist():
            stop = self.prefix + start + self.min_run
            length = common_prefix(
                self.old[self.prefix :][::-1], self.new[self.prefix : stop][::-1]
            )
            if length >= self.min_run and (best is None or length >= best.length):
                best = Match(stop - length, self.old.size - length, length)
        if best is not None:
            self.used[best.old :] = True
        return best

    def match(self, start: int, stop: int) -> Iterator[Match]:
        """Matches of `new[start:stop]` with what is unused of `old`, in ascending order."""
        new, ranked, left = self.new[:stop], self.ranked, self.left
        if not ranked.size:
            return
        found = ranked[np.minimum(left, ranked.size - 1)] == self.new_hashes
        hits = np.flatnonzero(found[: max(0, stop - self.min_run + 1 - self.prefix)])
        done = expected = start
        cursor = int(np.searchsorted(hits, start - self.prefix))
        while cursor < hits.size:
            hit = int(hits[cursor])
            same = ranked[left[hit] : left[hit] + _MAX_CANDIDATES] == self.new_hashes[hit]
            places = self.order[left[hit] : left[hit] + int(same.sum())] + self.prefix
            best = _longest(
                self.old, new, hit + self.prefix, places, self.used, expected, self.min_run
            )
            if best is None:
                cursor += 1
                continue
            match = _extend_left(self.old, new, best, self.used, done)
            self.used[match.old : match.old + match.length] = True
            done, expected = match.new + match.length, match.old + match.length
            yield match
            cursor = int(np.searchsorted(hits, done - self.prefix))


def _longest(
    old: IntArray,
    new: IntArray,
    start: int,
    candidates: npt.NDArray[np.intp],
    used: npt.NDArray[np.bool_],
    expected: int,
    min_run: int,
) -> Match | None:
    """The longest unused run at `start`; among equals the next one in the old order."""
    best: Match | None = None
    # Occurrences at or after the end of the last match first: most edits keep the order.
    for candidate in sorted(int(c) for c in candidates):
        length = common_prefix(old[candidate:], new[start:])
        taken = np.flatnonzero(used[candidate : candidate + length])
        length = int(taken[0]) if taken.size else length
        if length < min_run:
            continue
        in_order = candidate >= expected
        if best is None or (length, in_order) > (best.length, best.old >= expected):
            best = Match(start, candidate, length)
    return best


def _extend_left(
    old: IntArray, new: IntArray, match: Match, used: npt.NDArray[np.bool_], done: int
) -> Match:
    extra = 0
    while (
        match.new - extra > done
        and match.old - extra > 0
        and not used[match.old - extra - 1]
        and old[match.old - extra - 1] == new[match.new - extra - 1]
    ):
        extra += 1
    return Match(match.new - extra, match.old - extra, match.length + extra)


def in_order(matches: list[Match]) -> list[bool]:
    """Which matches keep the old order: the heaviest subsequence with ascending `old`.

    The others are spans that the edit moved.
    """
    if all(a.old < b.old for a, b in itertools.pairwise(matches)):
        return [True] * len(matches)
    weight = [match.length for match in matches]
    before = [-1] * len(matches)
    for i, match in enumerate(matches):
        for j in range(i):
            if matches[j].old < match.old and weight[j] + match.length > weight[i]:
                weight[i], before[i] = weight[j] + match.length, j
    keep = [False] * len(matches)
    at = max(range(len(matches)), key=weight.__getitem__)
    while at >= 0:
        keep[at] = True
        at = before[at]
    return keep
