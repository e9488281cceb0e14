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


def sampled_text(chat: ChatTokenizer, ids: Sequence[int], turn: int) -> Sampled:
    """Wrap sampled ids; a final end-of-turn id stays among the ids but not in the text."""
    array = np.asarray(ids, dtype=np.int64)
    ended = array.size > 0 and int(array[-1]) in chat.eos_ids
    return Sampled(turn, array, chat.decode((array[:-1] if ended else array).tolist()))


def render_pieces(chat: ChatTokenizer, messages: Sequence[Message]) -> list[Piece]:
    """The prompt for the next model call, generation prompt included, as pieces in order."""
    text = chat.render([{"role": m.role, "content": m.text} for m in messages])
    slots = [part for m in messages for part in m.parts if isinstance(part, Sampled)]
    spliced = set(range(len(slots)))
    marked = _render_marked(chat, messages, spliced)
    if _unmark(marked, slots) != text:
        # The template looks into the content: splice only what it renders verbatim.
        spliced = {
            i
            for i in range(len(slots))
            if _unmark(_render_marked(chat, messages, {i}), slots) == text
        }
        marked = _render_marked(chat, messages, spliced)
        if _unmark(marked, slots) != text:
            marked = text
    return _tokenise(chat, marked, slots)


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


def _unmark(marked: str, slots: Sequence[Sampled]) -> str:
    return "".join(
        before + (slots[slot].text if slot >= 0 else "") for before, slot in _split(marked)
    )


def _tokenise(chat: ChatTokenizer, marked: str, slots: Sequence[Sampled]) -> list[Piece]:
    pieces: list[Piece] = []
    ended = ""  # text of an end-of-turn token that was sampled just before
    for before, slot in _split(marked):
        if ended and before.startswith(ended):
            before = before[len(ended) :]
        elif ended:
            # The template does not close this text with its end-of-turn token.
            last = pieces.pop()
            pieces.append(Piece(last.ids[:-1], last.turn))
        if before:
            pieces.append(Piece(np.asarray(chat.encode(before), dtype=np.int64)))
        ended = ""
        if slot >= 0 and slots[slot].ids.size:
            sampled = slots[slot]
            pieces.append(Piece(sampled.ids, sampled.turn))
            if int(sampled.ids[-1]) in chat.eos_ids:
                ended = chat.decode([int(sampled.ids[-1])])
    return pieces


def prompt_ids(pieces: Sequence[Piece]) -> IntArray:
    """int64 `[P]`: the pieces' ids, one after the other."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(piece.ids for piece in pieces)])
