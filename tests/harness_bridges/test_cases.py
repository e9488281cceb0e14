"""Reported cases about records and drift, with their right values."""

import numpy as np
from support.episodes import episode

from harness_bridges.align import align
from harness_bridges.branches import branches, episode_tape, retokenised, survivors
from rollout_adapters.metrics import episode_metrics


def test_case_05_stripped_reasoning_is_named_and_not_an_unexplained_fork():
    # 3 is a think token: [1, 2, 3, 4, 5] becomes [1, 2, 4, 5, 6]
    e = episode([([1], [2, 3, 4, 5]), ([1, 2, 4, 5, 6], [7])])
    tape = episode_tape(e)
    (edit,) = tape.edits
    assert (edit.kind, edit.cause, edit.position) == ("strip", "chat_template", 5)
    assert edit.removed == ((2, 3),) and edit.inserted == ()
    left = survivors(e.turns, tape)
    assert list(zip(left.turn, left.offset, left.diverges, strict=True)) == [
        (0, 0, False),
        (0, 2, True),
        (0, 3, True),
        (1, 0, False),
    ]
    assert episode_metrics([e])["camp/template_junctions"] == 1.0


def test_case_06_retokenised_text_is_a_recorded_junction_and_never_spliced():
    # [10, 11] both read "ab", which the client encodes as 12
    e = episode([([1], [10, 11]), ([1, 12, 20], [30])])
    assert e.turns[0].output_ids.tolist() == [10, 11]
    assert len(branches(e.turns)) == 2
    (edit,) = episode_tape(e).edits
    assert edit.removed == ((1, 3),)
    left = survivors(e.turns, episode_tape(e))
    assert left.turn.tolist() == [1], "10 and 11 are scored on their own branch only"
    text = {1: "q", 10: "a", 11: "b", 12: "ab", 20: "x", 30: "y"}
    assert retokenised(e.turns, lambda ids: "".join(text[i] for i in ids)) == 1
    plain = episode([([1], [10, 11]), ([1, 10, 11, 20], [30]), ([1, 20], [30])])
    assert retokenised(plain.turns, lambda ids: "".join(text[i] for i in ids)) == 0


def test_a_short_answer_survives_the_reasoning_before_it():
    old = np.array([*range(100, 130), 7, 8])
    matches = align(old, np.array([*range(100, 110), 7, 8, 50, 51]), min_run=8)
    assert [(m.new, m.old, m.length) for m in matches] == [(0, 0, 10), (10, 30, 2)]


def test_common_words_do_not_pass_for_survivors():
    old = np.array([1, 2, 3, 50, 60, 70, 80, 90])
    new = np.array([1, 2, 3, 99, 60, 70, 98, 97])
    assert [(m.new, m.old, m.length) for m in align(old, new, min_run=8)] == [(0, 0, 3)]


def test_a_moved_block_is_one_removal_and_one_insertion():
    head, old_text, summary = list(range(10)), list(range(100, 130)), list(range(200, 212))
    e = episode([(head + old_text, summary), (head + summary + old_text[-15:], [5])])
    (edit,) = episode_tape(e).edits
    assert edit.removed == ((10, 25), (40, 52))
    assert edit.inserted == ((10, (40, 52)),)


def test_metrics_of_an_episode_without_edits():
    found = episode_metrics([episode([([1, 2], [3]), ([1, 2, 3, 4], [5])])])
    assert found["camp/segments"] == found["camp/pack_ratio"] == 1.0
    assert found["camp/edit_freq"] == 0.0 and np.isnan(found["camp/edit_depth"])
    assert found["camp/max_context"] == 5
