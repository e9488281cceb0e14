"""The episode viewer: one HTML file with everything in it, to open in any browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from harness_bridges.branches import Branch, branches, episode_tape
from harness_bridges.record import Edit, Episode, FloatArray, IntArray
from harness_bridges.spans import spans_of
from harness_bridges.tape import Tape
from loss_hooks.prefix_tree import build_tree
from loss_hooks.rows import walk_targets

Decode = Callable[[Sequence[int]], str]
Scores = Mapping[str, FloatArray]
"""Log-probs under each conditioning: `walk` `[S]` of the walk's targets, `full` and `exact` `[N]`
of all sampled tokens, turn by turn."""

ROLES = ("system", "user", "response", "observation", "edit", "template")
"""Who wrote a token: the opening's system and user messages, the policy, what came in later
turns, text that an edit brought, and chat markup or example replies."""
_HEADER = re.compile(
    r"<\|im_start\|>(\w+)\n"
    r"|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*"
    r"|<start_of_turn>(\w+)\n"
)
_SPEAKERS = {
    "system": "system",
    "developer": "system",
    "assistant": "template",
    "model": "template",
    "tool": "observation",
}
_STRIPS = (("naive_compressed, sdcc", "walk"), ("naive_full", "full"), ("exact", "exact"))
_LONGEST_CHARACTER = 4  # bytes, so tokens, of one UTF-8 character


def write_report(
    episodes: Iterable[Episode],
    path: Path,
    *,
    title: str,
    decode: Decode | None,
    score: Callable[[Episode], Scores] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write the viewer with these episodes.

    Args:
        episodes: in the order of the list.
        path: of the HTML file.
        title: shown at the top.
        decode: the tokenizer, token ids to exact text; None shows the ids.
        score: log-probs of an episode for the heat strips; None leaves them out.
        progress: called once per episode.
    """
    heads, blocks = [], []
    for episode in episodes:
        data = episode_data(episode, decode, score(episode) if score else {})
        heads.append(data.pop("head"))
        blocks.append(f'<script type="application/json" class="episode">{_json(data)}</script>')
        progress()
    index = _json({"title": title, "roles": ROLES, "scored": score is not None, "episodes": heads})
    page = _asset("viewer.html")
    parts = {
        "STYLE": _asset("viewer.css"),
        "DATA": f'<script type="application/json" id="index">{index}</script>' + "".join(blocks),
        "CODE": "".join(map(_asset, ("stairs.js", "panels.js", "viewer.js"))),
    }
    # In one pass: what an episode says is never taken for a place.
    page = re.sub(r"/\*(STYLE|DATA|CODE)\*/", lambda place: parts[place[1]], page)
    path.write_text(page, encoding="utf-8")


def _asset(name: str) -> str:
    return files("camp_plugin.report").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that cannot end the script element it is in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def episode_data(episode: Episode, decode: Decode | None, scores: Scores) -> dict[str, Any]:
    """One episode as the viewer reads it; every span is `[start, stop)` on the tape."""
    tape = episode_tape(episode)
    texts = token_texts(tape.tokens, decode)
    vocabulary: dict[tuple[int, str], int] = {}
    index = [
        vocabulary.setdefault((token, text), len(vocabulary))
        for token, text in zip(tape.tokens.tolist(), texts, strict=True)
    ]
    legs = branches(episode.turns)
    row_of = {t: row for row, leg in enumerate(legs) for t in range(leg.first, leg.last + 1)}
    return {
        "head": {
            "id": episode.rollout_id,
            "group": episode.group_id,
            "task": episode.task_id,
            "reward": episode.reward,
            "status": episode.status,
            "turns": len(episode.turns),
            "edits": len(tape.edits),
            "tokens": int(tape.tokens.size),
            "sampled": episode.num_sampled,
        },
        "vocabulary": [[token, text] for token, text in vocabulary],
        "tokens": index,
        "roles": _runs(token_roles(tape, texts)),
        "outputs": [list(span) for span in tape.outputs],
        "logprobs": [np.round(turn.output_logprobs, 4).tolist() for turn in episode.turns],
        "rows": [
            {
                "first": leg.first,
                "last": leg.last,
                "view": _view(tape, leg.last),
                **fork,
            }
            for leg, fork in zip(legs, _forks(episode, legs), strict=True)
        ],
        "edits": [_edit(tape, edit, row_of[edit.turn]) for edit in tape.edits],
        "strips": _strips(episode, tape, scores),
    }


def token_texts(tokens: IntArray, decode: Decode | None) -> list[str]:
    """A text for every tape token; a character of several tokens belongs to its first one."""
    ids = tokens.tolist()
    if decode is None:
        return [f"[{token}]" for token in ids]
    cache: dict[int, str] = {}
    texts = [cache[t] if t in cache else cache.setdefault(t, decode([t])) for t in ids]
    at = 0
    while at < len(ids):
        size = 1
        if "\ufffd" in texts[at]:
            size = _character(ids, at, decode)
        if size > 1:
            texts[at : at + size] = [decode(ids[at : at + size]), *[""] * (size - 1)]
        at += size
    return texts


def _character(ids: Sequence[int], at: int, decode: Decode) -> int:
    """Tokens from `at` on that make whole characters; 1 if none do."""
    for size in range(2, _LONGEST_CHARACTER + 1):
        if "\ufffd" not in decode(ids[at : at + size]):
            return size
    return 1


def token_roles(tape: Tape, texts: Sequence[str]) -> IntArray:
    """int64 `[L]`: index into `ROLES`; who wrote prompt text is read off the chat markup."""
    written = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    role = np.full(tape.tokens.size, ROLES.index("user"), dtype=np.int64)
    # An output is followed by the markup that closes it, not by a header of its own.
    heads = list(_HEADER.finditer("".join(texts)))
    for number, head in enumerate(heads):
        name = next(filter(None, head.groups()))
        start = int(np.searchsorted(written, head.start()))
        following = heads[number + 1].start() if number + 1 < len(heads) else written[-1]
        role[start : int(np.searchsorted(written, following))] = ROLES.index(
            _SPEAKERS.get(name, "user")
        )
    first = tape.outputs[0][0]
    later = np.arange(tape.tokens.size) >= first
    role[later & (role == ROLES.index("user"))] = ROLES.index("observation")
    for edit in tape.edits:
        for _, (start, stop) in edit.inserted:
            if start >= edit.position:
                role[start:stop] = ROLES.index("edit")
    role[tape.turn >= 0] = ROLES.index("response")
    return role


def _runs(values: IntArray) -> list[list[int]]:
    """`[start, value]` of every run of equal values."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return [[int(start), int(values[start])] for start in starts]


def _view(tape: Tape, turn: int) -> list[list[int]]:
    """The live context of a turn, its output included, in the order that the policy saw."""
    spans = [*tape.views[turn].tolist(), list(tape.outputs[turn])]
    return [span for span in spans if span[0] < span[1]]


def _forks(episode: Episode, legs: Sequence[Branch]) -> list[dict[str, int]]:
    """Where each branch leaves the tree: the first row that has the prefix which it shares, and
    the length of that prefix."""
    tree, paths = build_tree([episode.turns[leg.last].sequence for leg in legs])
    owner = np.full(tree.tokens.size, -1, dtype=np.int64)
    forks = []
    for row, path in enumerate(paths):
        new = np.flatnonzero(owner[path] < 0)
        fork = int(new[0]) if new.size else int(path.size)
        parent = int(owner[path[fork - 1]]) if fork else -1
        forks.append({"parent": parent, "fork": fork, "length": int(path.size)})
        owner[path[fork:]] = row
    return forks


def _edit(tape: Tape, edit: Edit, row: int) -> dict[str, Any]:
    before = tape.positions(edit.turn - 1, output=True)
    after = tape.positions(edit.turn)
    return {
        "turn": edit.turn,
        "row": row,
        "kind": edit.kind,
        "cause": edit.cause,
        "position": edit.position,
        "removed": [list(span) for span in edit.removed],
        "inserted": [list(span) for _, span in edit.inserted],
        "left": int(np.setdiff1d(before, after).size),
        "summary": _summary(tape, edit, after),
    }


def _summary(tape: Tape, edit: Edit, after: IntArray) -> list[list[int]]:
    """What the policy had just written to stand for what it folded, as far as it stayed."""
    if edit.kind not in ("fold", "compact"):
        return []
    written = np.arange(*tape.outputs[edit.turn - 1])
    spans: list[list[int]] = spans_of(np.intersect1d(written, after)).tolist()
    return spans


def _strips(episode: Episode, tape: Tape, scores: Scores) -> list[dict[str, Any]]:
    """Train minus rollout log-prob per method, at tape positions."""
    starts = np.array([start for start, _ in tape.outputs], dtype=np.int64)
    rollout = np.concatenate([turn.output_logprobs for turn in episode.turns])
    everything = np.flatnonzero(tape.turn >= 0)
    left = walk_targets(episode)
    walk = starts[left.turn] + left.offset
    at = {"walk": walk, "full": everything, "exact": everything}
    where = np.searchsorted(everything, walk)
    then = {"walk": rollout[where], "full": rollout, "exact": rollout}
    return [
        {
            "name": name,
            "at": at[key].tolist(),
            "difference": np.round(scores[key] - then[key], 4).tolist(),
        }
        for name, key in _STRIPS
        if key in scores
    ]
