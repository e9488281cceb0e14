"""The tape and the live views, derived from the turns (002, §3.2 and Appendix E.1).

The tape H_T holds every token that was ever in a live view, once, in order of first appearance.
A live view is an ordered list of tape spans: order is stored, not assumed, since a fold puts a
later summary in front of earlier text and a retrieve brings a span back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness_bridges.align import Match, align, in_order
from harness_bridges.errors import RecordError
from harness_bridges.record import Edit, IntArray, Span, Turn

DEFAULT_MIN_RUN = 8

View = IntArray
"""int64 `[S, 2]`: tape spans in view order."""


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
            spans = _append(spans, self.outputs[turn])
        return span_positions(spans)


def span_positions(spans: View) -> IntArray:
    """int64 `[sum of lengths]`: the tape positions that the spans list."""
    if spans.size == 0:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(start, stop) for start, stop in spans.tolist()])


def _append(spans: View, span: Span) -> View:
    start, stop = span
    if start == stop:
        return spans
    if spans.size and spans[-1, 1] == start:
        spans = spans.copy()
        spans[-1, 1] = stop
        return spans
    return np.concatenate([spans.reshape(-1, 2), np.array([[start, stop]], dtype=np.int64)])


def _slice(spans: View, start: int, stop: int) -> View:
    """The part `[start, stop)` of a view, by view offsets."""
    parts = np.empty((0, 2), dtype=np.int64)
    at = 0
    for a, b in spans.tolist():
        low, high = max(start - at, 0), min(stop - at, b - a)
        if low < high:
            parts = _append(parts, (a + low, a + high))
        at += b - a
    return parts


def _length(spans: View) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum()) if spans.size else 0


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


def spans_of(positions: IntArray) -> View:
    """The inverse of `span_positions`: maximal runs of consecutive tape positions."""
    if positions.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = positions[np.concatenate([[0], breaks])]
    stops = positions[np.concatenate([breaks - 1, [positions.size - 1]])] + 1
    return np.stack([starts, stops], axis=1)


class _Builder:
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
        self.view = _append(view, (start, stop))
        self.length = stop

    def build(self, edits: tuple[Edit, ...]) -> Tape:
        n = self.length
        tokens, turn, offset = self.tokens[:n], self.turn[:n], self.offset[:n]
        views, outputs = tuple(self.views), tuple(self.outputs)
        return Tape(tokens.copy(), turn.copy(), offset.copy(), views, outputs, edits)


def build_tape(
    turns: Sequence[Turn],
    edits: Sequence[Edit] | None = None,
    *,
    min_run: int = DEFAULT_MIN_RUN,
) -> Tape:
    """Lay an episode's turns on the tape.

    Args:
        turns: the ground truth, in order.
        edits: the asserted edits, or None to recover them by token alignment.
        min_run: for recovery, the shortest run of equal tokens that counts as a survivor.

    Raises:
        RecordError: if the asserted edits do not reproduce a prompt; the message names the turn
            and the first token that differs.
    """
    return _recover(turns, min_run) if edits is None else _replay(turns, tuple(edits))


def _replay(turns: Sequence[Turn], edits: tuple[Edit, ...]) -> Tape:
    by_turn: dict[int, list[Edit]] = {}
    for edit in edits:
        if edit.turn >= len(turns):
            raise RecordError(f"edit.turn={edit.turn}: the episode has {len(turns)} turns")
        by_turn.setdefault(edit.turn, []).append(edit)
    builder = _Builder(turns)
    for index, turn in enumerate(turns):
        view, length = builder.view, builder.length
        for edit in by_turn.get(index, []):
            view, length = _apply(edit, view, length, index)
        tail = turn.prompt_ids.size - _length(view)
        if tail < 0:
            raise RecordError(
                f"turn {index}: its prompt has {turn.prompt_ids.size} tokens, the edited view "
                f"{_length(view)}; no edit covers this break"
            )
        view = _append(view, (length, length + tail))
        _check_prompt(turn, index, view, builder)
        builder.add_turn(turn, view)
    return builder.build(edits)


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
        if offset > _length(view):
            raise RecordError(f"{where}: inserted offset {offset} is beyond the view")
        positions = span_positions(view)
        if np.any((positions >= start) & (positions < stop)):
            raise RecordError(f"{where}: inserted span ({start}, {stop}) is already in the view")
        halves = (positions[:offset], np.arange(start, stop), positions[offset:])
        view = spans_of(np.concatenate(halves))
        length = max(length, stop)
    return view, length


def _check_prompt(turn: Turn, index: int, view: View, builder: _Builder) -> None:
    positions = span_positions(view)
    known = np.flatnonzero(positions < builder.length)
    have = builder.tokens[positions[known]]
    different = np.flatnonzero(have != turn.prompt_ids[known])
    if different.size:
        at = int(known[different[0]])
        raise RecordError(
            f"turn {index}: prompt_ids[{at}]={int(turn.prompt_ids[at])}, but the live view has "
            f"{int(have[different[0]])} there; no edit covers this break"
        )


class _DeadSpans:
    """Blocks of tokens that left the view, so that a retrieve can find them again."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.blocks: dict[bytes, int] = {}

    def bury(self, tokens: IntArray, start: int) -> None:
        for at in range(0, tokens.size - self.width + 1, self.width):
            self.blocks[tokens[at : at + self.width].tobytes()] = start + at

    def find(self, new: IntArray, tape: IntArray, live: npt.NDArray[np.bool_]) -> list[Match]:
        """Runs of `new` that are dead tape spans; `old` of a match is a tape position."""
        matches: list[Match] = []
        at = 0
        while at + self.width <= new.size:
            start = self.blocks.get(new[at : at + self.width].tobytes())
            length = 0 if start is None else self._run(new[at:], tape[start:], live[start:])
            if start is None or length < self.width:
                at += 1
                continue
            # Blocks are indexed every `width` tokens: the run may have begun before this one.
            floor = matches[-1].new + matches[-1].length if matches else 0
            while (
                at > floor and start > 0 and not live[start - 1] and tape[start - 1] == new[at - 1]
            ):
                at, start, length = at - 1, start - 1, length + 1
            matches.append(Match(at, start, length))
            live[start : start + length] = True
            at += length
        return matches

    def _run(self, new: IntArray, tape: IntArray, live: npt.NDArray[np.bool_]) -> int:
        n = min(new.size, tape.size)
        stop = np.flatnonzero((new[:n] != tape[:n]) | live[:n])
        return int(stop[0]) if stop.size else n


def _recover(turns: Sequence[Turn], min_run: int) -> Tape:
    builder = _Builder(turns)
    edits: list[Edit] = []
    dead = _DeadSpans(min_run)
    previous = np.empty(0, dtype=np.int64)
    for index, turn in enumerate(turns):
        matches = align(previous, turn.prompt_ids, min_run=min_run)
        blocks = match_blocks(builder.view, matches)
        if dead.blocks:
            blocks += _retrieved(builder, turn, matches, dead)
        view = lay_view(turn.prompt_ids.size, blocks, builder.length)
        edit = edit_between(builder.view, matches, view, index, builder.length)
        if edit is not None:
            edits.append(_label(edit, view, builder))
            for start, stop in edit.removed:
                dead.bury(builder.tokens[start:stop], start)
        builder.add_turn(turn, view)
        previous = turn.sequence
    return builder.build(tuple(edits))


def _retrieved(
    builder: _Builder, turn: Turn, matches: list[Match], dead: _DeadSpans
) -> list[tuple[int, View]]:
    live = np.zeros(builder.length, dtype=np.bool_)
    live[span_positions(builder.view)] = True
    tape = builder.tokens[: builder.length]
    blocks = []
    for start, stop in gaps([(m.new, m.new + m.length) for m in matches], turn.prompt_ids.size):
        for match in dead.find(turn.prompt_ids[start:stop], tape, live):
            span = np.array([[match.old, match.old + match.length]], dtype=np.int64)
            blocks.append((start + match.new, span))
    return blocks


def match_blocks(view: View, matches: Sequence[Match]) -> list[tuple[int, View]]:
    """`(prompt offset, tape spans)` of every match with the old `view`."""
    return [(m.new, _slice(view, m.old, m.old + m.length)) for m in matches]


def gaps(spans: Sequence[Span], size: int) -> list[Span]:
    """What the ascending, disjoint `spans` leave uncovered of `[0, size)`."""
    edges = [(0, 0), *spans, (size, size)]
    between = [(a[1], b[0]) for a, b in itertools.pairwise(edges)]
    return [(start, stop) for start, stop in between if start < stop]


def lay_view(size: int, blocks: Sequence[tuple[int, View]], length: int) -> View:
    """A prompt of `size` tokens as tape spans: the known blocks, the rest fresh.

    Args:
        size: P, the prompt's length.
        blocks: `(prompt offset, tape spans)`, disjoint.
        length: the tape's length so far; fresh tokens take positions from here on.
    """
    pieces = sorted(blocks, key=lambda block: block[0])
    edges = [(offset, offset + _length(spans)) for offset, spans in pieces]
    for start, stop in gaps(edges, size):
        pieces.append((start, np.array([[length, length + stop - start]], dtype=np.int64)))
        length += stop - start
    view = np.empty((0, 2), dtype=np.int64)
    for _, spans in sorted(pieces, key=lambda piece: piece[0]):
        for start, stop in spans.tolist():
            view = _append(view, (start, stop))
    return view


def edit_between(
    before: View, matches: Sequence[Match], after: View, turn: int, position: int
) -> Edit | None:
    """The edit that turns the view `before` into the leading part of `after`.

    Text after the last old token is an ordinary observation and belongs to no edit. Kind and
    cause are `replace` and `harness` until somebody knows better.

    Args:
        before: the previous prompt and output as tape spans.
        matches: how `after` matches it.
        after: the next prompt as tape spans, fresh ones from `position` on.
        turn: index of the turn that `after` prompts.
        position: the tape's length before the turn.

    Returns:
        None if nothing left the view, moved, came back or was put between old tokens.
    """
    old = span_positions(before)
    stays = np.zeros(old.size, dtype=np.bool_)
    for match, keep in zip(matches, in_order(list(matches)), strict=True):
        if keep:
            stays[match.old : match.old + match.length] = True
    new = span_positions(after)
    known = np.flatnonzero(new < position)
    end = int(known[-1]) + 1 if known.size else 0
    is_new = ~np.isin(new[:end], old[stays], assume_unique=True)
    removed = spans_of(np.sort(old[~stays]))
    inserted = _insertions(new[:end], is_new)
    if not removed.size and not inserted:
        return None
    return Edit(
        turn=turn,
        position=position,
        removed=tuple((int(a), int(b)) for a, b in removed),
        inserted=inserted,
        kind="replace",
        cause="harness",
    )


def _insertions(new: IntArray, is_new: npt.NDArray[np.bool_]) -> tuple[tuple[int, Span], ...]:
    found: list[tuple[int, Span]] = []
    for offset in np.flatnonzero(is_new).tolist():
        at = int(new[offset])
        if found:
            last, (start, stop) = found[-1]
            if stop == at and last + stop - start == offset:
                found[-1] = (last, (start, at + 1))
                continue
        found.append((offset, (at, at + 1)))
    return tuple(found)


def _label(edit: Edit, view: View, builder: _Builder) -> Edit:
    """A recovered edit's kind from its shape; only a bridge can know the intention."""
    removed = span_positions(np.array(edit.removed, dtype=np.int64).reshape(-1, 2))
    gone = np.setdiff1d(removed, span_positions(view))
    if gone.size == 0:
        came_back = any(start < edit.position for _, (start, _) in edit.inserted)
        return replace(edit, kind="retrieve" if came_back else "replace")
    if edit.inserted:
        return edit
    if bool(np.all(builder.turn[gone] >= 0)):
        # Sampled text that vanishes without a trace is what templates do to old reasoning.
        return replace(edit, kind="strip", cause="chat_template")
    return replace(edit, kind="pop")
