"""The tape and the live views, derived from the turns (002, §3.2 and Appendix E.1).

The tape H_T holds every token that was ever in a live view, once, in order of first appearance.
A live view is an ordered list of tape spans: order is stored, not assumed, since a fold puts a
later summary in front of earlier text and a retrieve brings a span back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness_bridges.errors import RecordError
from harness_bridges.record import Edit, IntArray, Span, Turn
from harness_bridges.spans import View, append_span, span_positions, spans_of, view_length


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """All tokens of one episode, once each, and where they are seen.

    Example (one eviction of token 11 before the second call)::

        turn 0: prompt 10 11 12, output 20      views[0] = [[0, 3]]
        turn 1: prompt 10 12 20 13, output 21   views[1] = [[0, 1], [2, 5]]
        tokens = 10 11 12 20 13 21              turn = -1 -1 -1 0 -1 1
    """

    tokens: IntArray
    """int64 `[L]`."""
    turn: IntArray
    """int64 `[L]`: the turn that sampled the token, -1 for tokens that nobody sampled."""
    offset: IntArray
    """int64 `[L]`: the token's index in its turn's output, -1 likewise."""
    views: tuple[View, ...]
    """The live view of each turn: its prompt as tape spans."""
    outputs: tuple[Span, ...]
    """The tape span of each turn's output."""
    edits: tuple[Edit, ...]
    """The edits between the views, asserted or recovered."""

    def positions(self, turn: int, *, output: bool = False) -> IntArray:
        """int64: tape positions of the turn's prompt, followed by its output if asked."""
        spans = self.views[turn]
        if output:
            spans = append_span(spans, self.outputs[turn])
        return span_positions(spans)


class TapeBuilder:
    """Lays the turns on the tape one after the other."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        capacity = sum(turn.prompt_ids.size + turn.output_ids.size for turn in turns)
        self.tokens: IntArray = np.empty(capacity, dtype=np.int64)
        self.turn: IntArray = np.full(capacity, -1, dtype=np.int64)
        self.offset: IntArray = np.full(capacity, -1, dtype=np.int64)
        self.length = 0
        self.view: View = np.empty((0, 2), dtype=np.int64)
        self.views: list[View] = []
        self.outputs: list[Span] = []

    def add_turn(self, turn: Turn, view: View) -> None:
        """`view` is the prompt; its positions from `self.length` on take the prompt's tokens."""
        positions = span_positions(view)
        new = positions >= self.length
        self.tokens[positions[new]] = turn.prompt_ids[new]
        start = self.length + int(new.sum())
        stop = start + turn.output_ids.size
        self.tokens[start:stop] = turn.output_ids
        self.turn[start:stop] = len(self.views)
        self.offset[start:stop] = np.arange(stop - start)
        self.views.append(view)
        self.outputs.append((start, stop))
        self.view = append_span(view, (start, stop))
        self.length = stop

    def build(self, edits: tuple[Edit, ...]) -> Tape:
        n = self.length
        tokens, turn, offset = self.tokens[:n], self.turn[:n], self.offset[:n]
        views, outputs = tuple(self.views), tuple(self.outputs)
        return Tape(tokens.copy(), turn.copy(), offset.copy(), views, outputs, edits)


def replay(turns: Sequence[Turn], edits: tuple[Edit, ...]) -> Tape:
    """Lay an episode's turns on the tape by its asserted edits.

    Raises:
        RecordError: if the edits do not reproduce a prompt; the message names the turn and the
            first token that differs.
    """
    by_turn: dict[int, list[Edit]] = {}
    for edit in edits:
        if edit.turn >= len(turns):
            raise RecordError(f"edit.turn={edit.turn}: the episode has {len(turns)} turns")
        by_turn.setdefault(edit.turn, []).append(edit)
    builder = TapeBuilder(turns)
    for index, turn in enumerate(turns):
        view, length = builder.view, builder.length
        for edit in by_turn.get(index, []):
            view, length = _apply(edit, view, length, index)
        tail = turn.prompt_ids.size - view_length(view)
        if tail < 0:
            raise RecordError(
                f"turn {index}: its prompt has {turn.prompt_ids.size} tokens, the edited view "
                f"{view_length(view)}; no edit covers this break"
            )
        view = append_span(view, (length, length + tail))
        _check_prompt(turn, index, view, builder)
        builder.add_turn(turn, view)
    return builder.build(edits)


def _remove(spans: View, removed: Sequence[Span], where: str) -> View:
    positions = span_positions(spans)
    gone = np.zeros(positions.size, dtype=np.bool_)
    for start, stop in removed:
        hit = (positions >= start) & (positions < stop)
        if int(hit.sum()) != stop - start:
            raise RecordError(
                f"{where}: removed span ({start}, {stop}) is not wholly in the live view; an edit "
                "can only remove what the policy saw"
            )
        gone |= hit
    return spans_of(positions[~gone])


def _apply(edit: Edit, view: View, length: int, index: int) -> tuple[View, int]:
    where = f"turn {index}, edit {edit.kind}"
    if edit.position != length:
        raise RecordError(f"{where}: position={edit.position}, but the tape has {length} tokens")
    view = _remove(view, edit.removed, where)
    for offset, (start, stop) in edit.inserted:
        if stop > length and start != length:
            raise RecordError(
                f"{where}: inserted span ({start}, {stop}) neither lies on the tape nor starts "
                f"at its end, {length}"
            )
        if offset > view_length(view):
            raise RecordError(f"{where}: inserted offset {offset} is beyond the view")
        positions = span_positions(view)
        if np.any((positions >= start) & (positions < stop)):
            raise RecordError(f"{where}: inserted span ({start}, {stop}) is already in the view")
        halves = (positions[:offset], np.arange(start, stop), positions[offset:])
        view = spans_of(np.concatenate(halves))
        length = max(length, stop)
    return view, length


def _check_prompt(turn: Turn, index: int, view: View, builder: TapeBuilder) -> None:
    positions = span_positions(view)
    fresh = np.sort(positions[positions >= builder.length])
    if not np.array_equal(fresh, builder.length + np.arange(fresh.size)):
        raise RecordError(
            f"turn {index}: its edits leave holes in the tape after position {builder.length}; "
            "text that an edit brings must still be in the prompt"
        )
    known = np.flatnonzero(positions < builder.length)
    have = builder.tokens[positions[known]]
    different = np.flatnonzero(have != turn.prompt_ids[known])
    if different.size:
        at = int(known[different[0]])
        raise RecordError(
            f"turn {index}: prompt_ids[{at}]={int(turn.prompt_ids[at])}, but the live view has "
            f"{int(have[different[0]])} there; no edit covers this break"
        )
