"""Turns into a record whose edits a white-box bridge asserts.

A bridge knows which turn sampled which tokens of a prompt, so survival is a fact here and not an
alignment: sampled pieces are matched by their turn, template text around them by extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from harness_bridges.align import Match, align, common_prefix
from harness_bridges.chat import Piece, prompt_ids
from harness_bridges.engine import Generation, RunIds
from harness_bridges.record import Edit, Episode, Turn
from harness_bridges.recover import DEFAULT_MIN_RUN, edit_between, lay_view, match_blocks
from harness_bridges.spans import View


class Recorder:
    """Collects one episode, turn by turn."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.edits: list[Edit] = []
        self._pieces: list[Piece] = []
        self._view: View = np.empty((0, 2), dtype=np.int64)
        self._length = 0

    def add(
        self, pieces: Sequence[Piece], generation: Generation, kind: str = "", cause: str = ""
    ) -> None:
        """Record one model call.

        Args:
            pieces: the prompt that was sent.
            generation: what came back.
            kind: of the edit that the bridge made since the last call. If it made none and the
                prompt does not extend the last one, the chat template re-rendered it: that is
                recorded as a `strip` by the `chat_template`.
            cause: likewise.
        """
        prompt = prompt_ids(pieces)
        matches = _matches(self._pieces, pieces)
        view = lay_view(prompt.size, match_blocks(self._view, matches), self._length)
        edit = edit_between(self._view, matches, view, len(self.turns), self._length)
        if edit is not None and self.turns:
            label = (kind, cause) if kind else ("strip", "chat_template")
            self.edits.append(replace(edit, kind=label[0], cause=label[1]))
        turn = Turn(
            prompt_ids=prompt,
            output_ids=generation.output_ids,
            output_logprobs=generation.output_logprobs,
            finish_reason=generation.finish_reason,
            weight_version=generation.weight_version,
        )
        fresh = prompt.size - sum(match.length for match in matches)
        start = self._length + fresh
        self._length = start + turn.output_ids.size
        self._view = np.concatenate([view, [[start, self._length]]])
        self._pieces = [*pieces, Piece(turn.output_ids, len(self.turns))]
        self.turns.append(turn)

    def episode(self, ids: RunIds, *, turn_rewards: tuple[float, ...], status: str) -> Episode:
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
            metadata=ids.metadata,
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


def _template(pieces: Sequence[Piece]) -> npt.NDArray[np.bool_]:
    """bool `[P]`: which tokens of the pieces nobody sampled."""
    parts = [np.full(piece.ids.size, piece.turn < 0) for piece in pieces]
    return np.concatenate([np.empty(0, dtype=np.bool_), *parts])
