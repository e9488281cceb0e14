"""Turns into a record whose edits a white-box bridge asserts.

A bridge knows which turn sampled which tokens of a prompt, so survival is a fact here and not an
alignment: sampled pieces are matched by their turn, template text around them by extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness_bridges.align import Match, align, common_prefix
from harness_bridges.chat import Piece, prompt_ids
from harness_bridges.engine import Generation, RunIds
from harness_bridges.record import Edit, Episode, IntArray, Turn
from harness_bridges.recover import (
    DEFAULT_MIN_RUN,
    DeadSpans,
    edit_between,
    lay_view,
    match_blocks,
)
from harness_bridges.spans import View, span_positions, spans_of


class Recorder:
    """Collects one episode, turn by turn."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.edits: list[Edit] = []
        self._pieces: list[Piece] = []
        self._view: View = np.empty((0, 2), dtype=np.int64)
        self._length = 0
        self._tape: list[IntArray] = []
        self._outputs: list[int] = []
        self._dead = DeadSpans()

    def add(self, pieces: Sequence[Piece], generation: Generation, kind: str, cause: str) -> None:
        """Record one model call.

        Args:
            pieces: the prompt that was sent.
            generation: what came back.
            kind: of the edit since the last call, if the prompt does not extend it.
            cause: likewise.
        """
        prompt = prompt_ids(pieces)
        matches = _matches(self._pieces, pieces)
        blocks = match_blocks(self._view, matches)
        if kind == "retrieve":
            blocks += self._revived(pieces, matches)
        view = lay_view(prompt.size, blocks, self._length)
        edit = edit_between(self._view, matches, view, len(self.turns), self._length)
        if edit is not None and self.turns:
            self.edits.append(replace(edit, kind=kind, cause=cause))
            self._bury(edit)
        turn = Turn(
            prompt_ids=prompt,
            output_ids=generation.output_ids,
            output_logprobs=generation.output_logprobs,
            finish_reason=generation.finish_reason,
            weight_version=generation.weight_version,
        )
        fresh = span_positions(view) >= self._length
        start = self._length + int(fresh.sum())
        self._length = start + turn.output_ids.size
        self._tape += [prompt[fresh], turn.output_ids]
        self._outputs.append(start)
        self._view = np.concatenate([view, [[start, self._length]]])
        self._pieces = [*pieces, Piece(turn.output_ids, len(self.turns))]
        self.turns.append(turn)

    def _bury(self, edit: Edit) -> None:
        tape = np.concatenate(self._tape)
        for start, stop in edit.removed:
            self._dead.bury(tape[start:stop], start)

    def _revived(self, pieces: Sequence[Piece], matches: Sequence[Match]) -> list[tuple[int, View]]:
        """Evicted text that is back: sampled pieces by their turn, the rest by its tokens."""
        finder = _Revival(prompt_ids(pieces), np.concatenate(self._tape), self._view, matches)
        at = 0
        for piece in pieces:
            if piece.turn >= 0:
                finder.take(at, self._outputs[piece.turn] + piece.offset, piece.ids.size)
            at += piece.ids.size
        return finder.rest(self._dead)

    def episode(
        self,
        ids: RunIds,
        *,
        turn_rewards: tuple[float, ...],
        status: str,
        metadata: Mapping[str, Any],
    ) -> Episode:
        """The finished record, its edits checked against its turns; the rewards add up."""
        return Episode(
            turns=tuple(self.turns),
            edits=tuple(self.edits),
            rollout_id=ids.rollout_id,
            group_id=ids.group_id,
            session_id=ids.session_id,
            task_id=ids.task_id,
            reward=sum(turn_rewards),
            turn_rewards=turn_rewards,
            status=status,
            metadata={**ids.metadata, **metadata},
        )


def _matches(old: Sequence[Piece], new: Sequence[Piece]) -> list[Match]:
    """Match sampled pieces by their turn, the equal template text next to them, then the rest."""
    anchors = _anchors(old, new)
    grower = _Grower(old, new, anchors)
    prefix = grower.right(Match(0, 0, 0), anchors[0] if anchors else None)
    matches = [prefix] if prefix.length else []
    for i, anchor in enumerate(anchors):
        floor = matches[-1].new + matches[-1].length if matches else 0
        following = anchors[i + 1] if i + 1 < len(anchors) else None
        matches.append(grower.right(grower.left(anchor, floor), following))
    return sorted([*matches, *grower.rest()], key=lambda match: match.new)


def _anchors(old: Sequence[Piece], new: Sequence[Piece]) -> list[Match]:
    where: dict[int, list[tuple[int, Piece]]] = {}
    at = 0
    for piece in old:
        if piece.turn >= 0:
            where.setdefault(piece.turn, []).append((at, piece))
        at += piece.ids.size
    found = []
    at = 0
    for piece in new:
        if where.get(piece.turn):
            # A text that is shown twice: the first mention carries the identity, the second is
            # text of its own, and stays that.
            old_at, before = where[piece.turn].pop(0)
            start = max(piece.offset, before.offset)
            stop = min(piece.offset + piece.ids.size, before.offset + before.ids.size)
            if start < stop:
                at_new, at_old = at + start - piece.offset, old_at + start - before.offset
                found.append(Match(at_new, at_old, stop - start))
        at += piece.ids.size
    return found


class _Grower:
    """Extends matches over template tokens that are equal and not matched yet."""

    def __init__(self, old: Sequence[Piece], new: Sequence[Piece], anchors: list[Match]) -> None:
        self.old, self.new = prompt_ids(old), prompt_ids(new)
        self.old_free, self.new_free = _template(old), _template(new)
        for anchor in anchors:
            self._take(anchor)

    def _take(self, match: Match) -> None:
        self.old_free[match.old : match.old + match.length] = False
        self.new_free[match.new : match.new + match.length] = False

    def rest(self) -> list[Match]:
        """Template text elsewhere: runs of equal tokens that nobody sampled."""
        # Numbers that occur once and are no token ids: what is taken matches nothing.
        old = np.where(self.old_free, self.old, -1 - 2 * np.arange(self.old.size))
        new = np.where(self.new_free, self.new, -2 - 2 * np.arange(self.new.size))
        return align(old, new, min_run=DEFAULT_MIN_RUN)

    def right(self, match: Match, following: Match | None) -> Match:
        start, limit = match.new + match.length, following.new if following else self.new.size
        old_start = match.old + match.length
        n = common_prefix(self.old[old_start:], self.new[start:limit])
        free = self.old_free[old_start : old_start + n] & self.new_free[start : start + n]
        blocked = np.flatnonzero(~free)
        n = int(blocked[0]) if blocked.size else n
        grown = Match(match.new, match.old, match.length + n)
        self._take(grown)
        return grown

    def left(self, match: Match, floor: int) -> Match:
        new, old = match.new, match.old
        while (
            new > floor
            and old > 0
            and self.old_free[old - 1]
            and self.new_free[new - 1]
            and self.old[old - 1] == self.new[new - 1]
        ):
            new, old = new - 1, old - 1
        grown = Match(new, old, match.length + match.new - new)
        self._take(grown)
        return grown


class _Revival:
    """Lays tape spans that are not in the view on the unmatched parts of a prompt."""

    def __init__(
        self, prompt: IntArray, tape: IntArray, view: View, matches: Sequence[Match]
    ) -> None:
        self.prompt, self.tape = prompt, tape
        self.free = np.ones(prompt.size, dtype=np.bool_)
        for match in matches:
            self.free[match.new : match.new + match.length] = False
        self.live = np.zeros(tape.size, dtype=np.bool_)
        self.live[span_positions(view)] = True
        self.blocks: list[tuple[int, View]] = []

    def take(self, new: int, old: int, length: int) -> None:
        """Lay `tape[old:old+length]` at `new` if both are free, with equal text around it."""
        if self.live[old : old + length].any() or not self.free[new : new + length].all():
            return
        left = self._run(new, old, -1)
        right = self._run(new + length - 1, old + length - 1, 1)
        start, stop = old - left, old + length + right
        self.live[start:stop] = True
        self.free[new - left : new + length + right] = False
        self.blocks.append((new - left, np.array([[start, stop]], dtype=np.int64)))

    def _run(self, new: int, old: int, step: int) -> int:
        count = 0
        while True:
            new, old = new + step, old + step
            inside = 0 <= new < self.prompt.size and 0 <= old < self.tape.size
            if not inside or not self.free[new] or self.live[old]:
                return count
            if self.prompt[new] != self.tape[old]:
                return count
            count += 1

    def rest(self, dead: DeadSpans) -> list[tuple[int, View]]:
        """All blocks, those that only their tokens tell included."""
        end = int(np.flatnonzero(~self.free)[-1]) if not self.free.all() else 0
        for start, stop in spans_of(np.flatnonzero(self.free)).tolist():
            for match in dead.find(self.prompt[start:stop], self.tape, self.live):
                if start > end and match.length < 2 * DEFAULT_MIN_RUN:
                    continue  # a new message's framing, not text that came back
                span = np.array([[match.old, match.old + match.length]], dtype=np.int64)
                self.blocks.append((start + match.new, span))
        return self.blocks


def _template(pieces: Sequence[Piece]) -> npt.NDArray[np.bool_]:
    """bool `[P]`: which tokens of the pieces nobody sampled."""
    parts = [np.full(piece.ids.size, piece.turn < 0) for piece in pieces]
    return np.concatenate([np.empty(0, dtype=np.bool_), *parts])
