"""Messages to token ids through the model's own chat template, sampled ids spliced in.

A sampled response goes into a later prompt as the very ids that were sampled, wherever the
template renders its text unchanged. Everything else is tokenised as the template renders it. So
a prompt is a pure function of the messages, and a template that re-renders an earlier turn
differently (Qwen3 drops old reasoning) shows up as a junction in the record instead of a wrong
log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness_bridges.engine import ChatTokenizer
from harness_bridges.record import IntArray

# Private-use characters: no text that a policy reads or writes contains them.
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Text that the policy sampled in turn `turn`, by its ids."""

    turn: int
    ids: IntArray
    """int64 `[N]`, end-of-turn token included if it was sampled."""
    text: str
    """Decoded ids, without the end-of-turn token."""


Part = str | Sampled


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; its content is plain text and sampled text in any order."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive prompt tokens: template text (`turn` -1) or what turn `turn` sampled."""

    ids: IntArray
    turn: int = -1
    offset: int = 0
    """Index of the first id in that turn's output: a template may keep only the end of it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """`text[start:stop]` of a rendering is `sampled.ids[offset:]`."""

    start: int
    stop: int
    sampled: Sampled
    offset: int = 0


def with_note(messages: Sequence[Message], *parts: Part) -> list[Message]:
    """The messages with something from the user's side at their end.

    It joins a last user message: templates of many models refuse two in a row.
    """
    *before, last = messages
    if last.role != "user":
        return [*messages, Message("user", parts)]
    return [*before, Message("user", (*last.parts, "\n\n", *parts))]


def sampled_text(chat: ChatTokenizer, ids: Sequence[int], turn: int) -> Sampled:
    """Wrap sampled ids; a final end-of-turn id stays among the ids but not in the text."""
    array = np.asarray(ids, dtype=np.int64)
    ended = array.size > 0 and int(array[-1]) in chat.eos_ids
    return Sampled(turn, array, chat.decode((array[:-1] if ended else array).tolist()))


def render_pieces(chat: ChatTokenizer, messages: Sequence[Message]) -> list[Piece]:
    """The prompt for the next model call, generation prompt included, as pieces in order."""
    text = chat.render([{"role": m.role, "content": m.text} for m in messages])
    if _OPEN in text or _CLOSE in text:
        return _tokenise(chat, text, [])  # somebody writes our marks: splice nothing
    slots = [part for m in messages for part in m.parts if isinstance(part, Sampled)]
    marked = _split(_render_marked(chat, messages, set(range(len(slots)))))
    regions = _regions(chat, marked, slots, text)
    if regions is None:
        # The template looks into the content: find what it made of each response on its own.
        found = (_find_region(chat, messages, slots, i, text) for i in range(len(slots)))
        regions = [region for region in found if region is not None]
    return _tokenise(chat, text, regions)


def _regions(
    chat: ChatTokenizer, marked: Sequence[tuple[str, int]], slots: Sequence[Sampled], text: str
) -> list[_Region] | None:
    """Read `text` along the marked rendering: each response whole, or the end of it.

    None if the template text between the responses differs.
    """
    regions, at = [], 0
    for (before, slot), (following, _) in zip(marked, [*marked[1:], ("", -1)], strict=True):
        if not text.startswith(before, at):
            return None
        at += len(before)
        if slot < 0:
            continue
        full = slots[slot].text
        cut = next(
            (k for k in range(len(full) + 1) if text.startswith(full[k:] + following, at)), -1
        )
        if cut < 0:
            return None
        stop = at + len(full) - cut
        offset = _suffix_offset(chat, slots[slot], full[cut:]) if cut else 0
        # An empty text may still stand for an end-of-turn token.
        if offset is not None and (stop > at or not cut):
            regions.append(_Region(at, stop, slots[slot], offset))
        at = stop
    return regions if at == len(text) else None


def _find_region(
    chat: ChatTokenizer, messages: Sequence[Message], slots: Sequence[Sampled], i: int, text: str
) -> _Region | None:
    """Where response i stands in `text`: whole, or its end where reasoning was dropped."""
    marked = _split(_render_marked(chat, messages, {i}))
    if len(marked) != 2:
        return None
    (before, _), (after, _) = marked
    stop = len(text) - len(after)
    if not (text.startswith(before) and text.endswith(after) and len(before) <= stop):
        return None
    shown = text[len(before) : stop]
    offset = _suffix_offset(chat, slots[i], shown)
    return None if offset is None else _Region(len(before), stop, slots[i], offset)


def _suffix_offset(chat: ChatTokenizer, sampled: Sampled, shown: str) -> int | None:
    """Index of the first id of `shown`; None if no token boundary lies there."""
    if shown == sampled.text:
        return 0
    if not shown or not sampled.text.endswith(shown):
        return None
    end = sampled.ids.size - int(_ended(chat, sampled))
    for offset in range(end):
        rest = chat.decode(sampled.ids[offset:end].tolist())
        if len(rest) <= len(shown):
            return offset if rest == shown else None
    return None


def _ended(chat: ChatTokenizer, sampled: Sampled) -> bool:
    return sampled.ids.size > 0 and int(sampled.ids[-1]) in chat.eos_ids


def _render_marked(chat: ChatTokenizer, messages: Sequence[Message], spliced: set[int]) -> str:
    index = 0
    rendered = []
    for message in messages:
        content = ""
        for part in message.parts:
            if isinstance(part, str):
                content += part
                continue
            content += f"{_OPEN}{index}{_CLOSE}" if index in spliced else part.text
            index += 1
        rendered.append({"role": message.role, "content": content})
    return chat.render(rendered)


def _split(marked: str) -> list[tuple[str, int]]:
    """`(text before, slot)` in order; the last one has slot -1."""
    found = []
    before, *rest = marked.split(_OPEN)
    for item in rest:
        slot, _, after = item.partition(_CLOSE)
        found.append((before, int(slot)))
        before = after
    return [*found, (before, -1)]


def _tokenise(chat: ChatTokenizer, text: str, regions: Sequence[_Region]) -> list[Piece]:
    pieces: list[Piece] = []
    at = 0
    for region in sorted(regions, key=lambda region: region.start):
        sampled, ids = region.sampled, region.sampled.ids
        _add_text(chat, pieces, text[at : region.start])
        at = region.stop
        if _ended(chat, sampled):
            end = chat.decode([int(ids[-1])])
            if text.startswith(end, at):
                at += len(end)
            else:  # the template does not close this text with its end-of-turn token
                ids = ids[:-1]
        if ids.size > region.offset:
            pieces.append(Piece(ids[region.offset :], sampled.turn, region.offset))
    _add_text(chat, pieces, text[at:])
    return pieces


def _add_text(chat: ChatTokenizer, pieces: list[Piece], text: str) -> None:
    if text:
        pieces.append(Piece(np.asarray(chat.encode(text), dtype=np.int64)))


def prompt_ids(pieces: Sequence[Piece]) -> IntArray:
    """int64 `[P]`: the pieces' ids, one after the other."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(piece.ids for piece in pieces)])
