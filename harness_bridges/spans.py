"""Views as ordered lists of tape spans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from harness_bridges.record import IntArray, Span

View = IntArray
"""int64 `[S, 2]`: tape spans in view order."""


def span_positions(spans: View) -> IntArray:
    """int64 `[sum of lengths]`: the tape positions that the spans list."""
    if spans.size == 0:
        return np.empty(0, dtype=np.int64)
    sizes = spans[:, 1] - spans[:, 0]
    # Each run counts up from its start: offsets within the whole minus where the run began.
    before = np.cumsum(sizes) - sizes
    positions: IntArray = np.repeat(spans[:, 0] - before, sizes)
    positions += np.arange(positions.size)
    return positions


def spans_of(positions: IntArray) -> View:
    """The inverse of `span_positions`: maximal runs of consecutive tape positions."""
    if positions.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = positions[np.concatenate([[0], breaks])]
    stops = positions[np.concatenate([breaks - 1, [positions.size - 1]])] + 1
    return np.stack([starts, stops], axis=1)


def join_views(parts: Sequence[View]) -> View:
    """One view after the other; spans that continue each other become one."""
    spans = np.concatenate([np.empty((0, 2), dtype=np.int64), *parts])
    if not spans.size:
        return spans
    fresh = np.concatenate([[True], spans[1:, 0] != spans[:-1, 1]])
    last = np.concatenate([fresh[1:], [True]])
    return np.stack([spans[fresh, 0], spans[last, 1]], axis=1)


def append_span(spans: View, span: Span) -> View:
    """The view with one more span at its end."""
    start, stop = span
    if start == stop:
        return spans
    if spans.size and spans[-1, 1] == start:
        spans = spans.copy()
        spans[-1, 1] = stop
        return spans
    return np.concatenate([spans.reshape(-1, 2), np.array([[start, stop]], dtype=np.int64)])


def slice_view(spans: View, start: int, stop: int) -> View:
    """The part `[start, stop)` of a view, by view offsets."""
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    begins = ends - (spans[:, 1] - spans[:, 0])
    low = spans[:, 0] + np.maximum(start - begins, 0)
    high = spans[:, 1] - np.maximum(ends - stop, 0)
    inside = low < high
    return np.stack([low[inside], high[inside]], axis=1)


def view_length(spans: View) -> int:
    """Number of tokens in a view."""
    return int((spans[:, 1] - spans[:, 0]).sum()) if spans.size else 0


def gaps(spans: Sequence[Span], size: int) -> list[Span]:
    """What the ascending, disjoint `spans` leave uncovered of `[0, size)`."""
    edges = [(0, 0), *spans, (size, size)]
    between = [(a[1], b[0]) for a, b in itertools.pairwise(edges)]
    return [(start, stop) for start, stop in between if start < stop]
