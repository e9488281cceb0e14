"""Eviction records recovered from payloads alone, by token alignment (002, E.2 and Figure 4).

What payloads cannot tell: which of two equal texts stayed. If a response is replaced by another
one that begins with the same tokens, those tokens pass for survivors of the first. A white-box
bridge knows better, and asserts its edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from harness_bridges.align import Match, align, in_order
from harness_bridges.record import Edit, IntArray, Span, Turn
from harness_bridges.spans import (
    View,
    gaps,
    join_views,
    slice_view,
    span_positions,
    spans_of,
    view_length,
)
from harness_bridges.tape import Tape, TapeBuilder, replay

DEFAULT_MIN_RUN = 8


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
    return _recover(turns, min_run) if edits is None else replay(turns, tuple(edits))


class DeadSpans:
    """Blocks of tokens that left the view, so that a retrieve can find them again."""

    def __init__(self, width: int = DEFAULT_MIN_RUN) -> None:
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
    builder = TapeBuilder(turns)
    edits: list[Edit] = []
    dead = DeadSpans(min_run)
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
    builder: TapeBuilder, turn: Turn, matches: list[Match], dead: DeadSpans
) -> list[tuple[int, View]]:
    """Old spans that came back between live ones.

    Text after the last live token is an observation, also where it repeats something old: a
    file that is read twice, a reminder that a harness sends again.
    """
    live = np.zeros(builder.length, dtype=np.bool_)
    live[span_positions(builder.view)] = True
    tape = builder.tokens[: builder.length]
    blocks = []
    edges = [(match.new, match.new + match.length) for match in matches]
    for start, stop in gaps(edges, edges[-1][1] if edges else 0):
        for match in dead.find(turn.prompt_ids[start:stop], tape, live):
            span = np.array([[match.old, match.old + match.length]], dtype=np.int64)
            blocks.append((start + match.new, span))
    return blocks


def match_blocks(view: View, matches: Sequence[Match]) -> list[tuple[int, View]]:
    """`(prompt offset, tape spans)` of every match with the old `view`."""
    return [(m.new, slice_view(view, m.old, m.old + m.length)) for m in matches]


def lay_view(size: int, blocks: Sequence[tuple[int, View]], length: int) -> View:
    """A prompt of `size` tokens as tape spans: the known blocks, the rest fresh.

    Args:
        size: P, the prompt's length.
        blocks: `(prompt offset, tape spans)`, disjoint.
        length: the tape's length so far; fresh tokens take positions from here on.
    """
    pieces = sorted(blocks, key=lambda block: block[0])
    edges = [(offset, offset + view_length(spans)) for offset, spans in pieces]
    for start, stop in gaps(edges, size):
        pieces.append((start, np.array([[length, length + stop - start]], dtype=np.int64)))
        length += stop - start
    return join_views([spans for _, spans in sorted(pieces, key=lambda piece: piece[0])])


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
    is_new = ~_members(old[stays], position)[np.minimum(new[:end], position)]
    removed = spans_of(np.sort(old[~stays]))
    inserted = _insertions(new[:end], is_new, position)
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


def _members(positions: IntArray, size: int) -> npt.NDArray[np.bool_]:
    """bool `[size + 1]`: which tape positions are among the given ones; the last is False."""
    flags = np.zeros(size + 1, dtype=np.bool_)
    flags[positions] = True
    return flags


def _insertions(
    new: IntArray, is_new: npt.NDArray[np.bool_], position: int
) -> tuple[tuple[int, Span], ...]:
    """Maximal inserted spans; what came from the tape and what the edit brought stay apart."""
    offsets = np.flatnonzero(is_new)
    if not offsets.size:
        return ()
    at = new[offsets]
    breaks = (np.diff(offsets) != 1) | (np.diff(at) != 1) | (at[1:] == position)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    stops = np.concatenate([starts[1:], [offsets.size]])
    return tuple(
        (int(offsets[a]), (int(at[a]), int(at[b - 1]) + 1))
        for a, b in zip(starts, stops, strict=True)
    )


def _label(edit: Edit, view: View, builder: TapeBuilder) -> Edit:
    """A recovered edit's kind from its shape; only a bridge can know the intention."""
    removed = span_positions(np.array(edit.removed, dtype=np.int64).reshape(-1, 2))
    live = _members(np.minimum(span_positions(view), edit.position), edit.position)
    gone = removed[~live[removed]]
    if gone.size == 0:
        came_back = any(start < edit.position for _, (start, _) in edit.inserted)
        return replace(edit, kind="retrieve" if came_back else "replace")
    if edit.inserted:
        return edit
    if bool(np.all(builder.turn[gone] >= 0)):
        # Sampled text that vanishes without a trace is what templates do to old reasoning.
        return replace(edit, kind="strip", cause="chat_template")
    return replace(edit, kind="pop")
