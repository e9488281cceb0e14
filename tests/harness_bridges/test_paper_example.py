"""The 13-token running example of 002 (Figure 1, Table 4), with the expected views typed by hand.

E1 = {y5} at J1 = 7, E2 = {y8} at J2 = 10, E3 = {y11} at J3 = 12; y13 is the answer.
"""

import numpy as np
import pytest
from support.episodes import episode

from harness_bridges.branches import branches, episode_tape, evicted_fraction, survivors
from harness_bridges.record import Edit
from loss_hooks.method import find_method
from loss_hooks.prefix_tree import build_tree

TURNS = [
    ([1, 2, 3, 4, 5], [6, 7]),
    ([1, 2, 3, 4, 6, 7, 8], [9, 10]),
    ([1, 2, 3, 4, 6, 7, 9, 10, 11], [12]),
    ([1, 2, 3, 4, 6, 7, 9, 10, 12], [13]),
]
# Table 4: leaf, live-view prefix, final-walk prefix
TABLE_4 = [
    (6, [1, 2, 3, 4, 5], [1, 2, 3, 4]),
    (7, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6]),
    (9, [1, 2, 3, 4, 6, 7, 8], [1, 2, 3, 4, 6, 7]),
    (10, [1, 2, 3, 4, 6, 7, 8, 9], [1, 2, 3, 4, 6, 7, 9]),
    (12, [1, 2, 3, 4, 6, 7, 9, 10, 11], [1, 2, 3, 4, 6, 7, 9, 10]),
    (13, [1, 2, 3, 4, 6, 7, 9, 10, 12], [1, 2, 3, 4, 6, 7, 9, 10, 12]),
]


def edit(turn, position, token):
    # tape position of token y_i is i - 1
    spans = {"removed": ((token - 1, token),), "inserted": ()}
    return Edit(turn=turn, position=position, kind="pop", cause="policy", **spans)


EDITS = (edit(1, 7, 5), edit(2, 10, 8), edit(3, 12, 11))


@pytest.fixture(params=["asserted", "recovered"])
def example(request):
    e = episode(TURNS, edits=EDITS if request.param == "asserted" else None)
    from harness_bridges.recover import build_tape

    return e, episode_tape(e) if request.param == "asserted" else build_tape(e.turns, min_run=1)


def test_tape_and_walk(example):
    e, tape = example
    assert tape.tokens.tolist() == list(range(1, 14))
    assert tape.outputs == ((5, 7), (8, 10), (11, 12), (12, 13))
    assert [e.turns[-1].sequence.tolist()] == [[1, 2, 3, 4, 6, 7, 9, 10, 12, 13]]


def test_eviction_records(example):
    _, tape = example
    assert [(x.turn, x.position, x.removed, x.inserted) for x in tape.edits] == [
        (1, 7, ((4, 5),), ()),
        (2, 10, ((7, 8),), ()),
        (3, 12, ((10, 11),), ()),
    ]
    assert evicted_fraction(tape) == 3 / 13


def test_leaves_diverge_as_in_table_4(example):
    e, tape = example
    left = survivors(e.turns, tape)
    walk = e.turns[-1].sequence.tolist()
    found = []
    for position, turn, offset in zip(left.position, left.turn, left.offset, strict=True):
        live = e.turns[turn].sequence[: e.turns[turn].prompt_ids.size + offset].tolist()
        found.append((walk[position], live, walk[:position]))
    assert found == TABLE_4
    assert left.diverges.tolist() == [True] * 5 + [False]


def test_branches_are_k_plus_one(example):
    e, _ = example
    assert [(b.first, b.last) for b in branches(e.turns)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    tree, _ = build_tree([t.sequence for t in e.turns])
    # 4 shared; 5 6 7 | 6 7 shared by three; 8 9 10 | 9 10 shared by two; 11 12 | 12 13
    assert tree.tokens.size == 4 + 3 + 2 + 3 + 2 + 2 + 2


def test_rows_of_every_method():
    rows = {
        m: find_method(m).rows(episode(TURNS, edits=EDITS)) for m in ("naive_full", "logit_tree")
    }
    (full,) = rows["naive_full"]
    assert full.prompt_length == 5
    assert full.loss_mask.tolist() == [1, 1, 0, 1, 1, 0, 1, 1]
    assert [r.loss_mask.tolist() for r in rows["logit_tree"]] == [[1, 1], [1, 1], [1], [1]]
    (walk,) = find_method("naive_compressed").rows(episode(TURNS, edits=EDITS))
    assert walk.tokens[walk.prompt_length :].tolist() == [6, 7, 9, 10, 12, 13]
    (sdcc,) = find_method("sdcc").rows(episode(TURNS, edits=EDITS))
    assert sdcc.record["leaf_rows"] == [3, 4, 5, 6, 7]
    predictors = np.array(sdcc.record["tokens"])[sdcc.record["teacher_rows"]]
    assert predictors.tolist() == [5, 6, 8, 9, 11]
