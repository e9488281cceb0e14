"""Every invariant of the record, each with the message that its breach gives."""

import math
import pickle

import numpy as np
import pytest
from support.episodes import episode, turn

from harness_bridges.errors import ConfigError, RecordError
from harness_bridges.record import Edit

EDIT = {"turn": 1, "position": 3, "removed": ((1, 2),), "inserted": ()}
EDIT |= {"kind": "pop", "cause": "policy"}
TWO = [([1, 2], [3]), ([1, 3], [4])]

BAD_TURNS = [
    ({"prompt": []}, "prompt_ids: is empty"),
    ({"prompt": [1, -2]}, "prompt_ids: token id -2 is negative"),
    ({"prompt": [[1, 2]]}, "prompt_ids: expected a flat list of token ids, got shape (1, 2)"),
    ({"prompt": [1.5]}, "prompt_ids: expected a flat list of token ids"),
    ({"prompt": [True]}, "dtype bool"),
    ({"output": ["a"]}, "output_ids: expected a flat list of token ids"),
    # case 07: a re-encoded response of another length than its log-probs
    ({"output": [1] * 6, "log_probs": [-1.0] * 7}, "len(output_logprobs)=7, len(output_ids)=6"),
    # case 37: a missing log-prob is refused, never filled in with 0 (probability one)
    ({"log_probs": [None]}, "output_logprobs[0]=nan"),
    ({"log_probs": None, "explicit": True}, "every sampled token needs"),
    ({"log_probs": [math.nan]}, "output_logprobs[0]=nan: a log-prob is finite and at most 0"),
    ({"log_probs": [-math.inf]}, "output_logprobs[0]=-inf"),
    ({"log_probs": [0.5]}, "output_logprobs[0]=0.5"),
    ({"finish_reason": "done"}, "finish_reason='done': expected one of stop, length, abort"),
    ({"weight_version": 3}, "weight_version=3: expected a string"),
]
BAD_EDITS = [
    ({"kind": "eat"}, "edit.kind='eat': expected one of pop, fold"),
    ({"cause": "god"}, "edit.cause='god'"),
    ({"turn": 0}, "edit.turn=0"),
    ({"removed": ((2, 5),)}, "edit.removed=(2, 5): not within the tape [0, 3)"),
    ({"removed": ((1, 1),)}, "edit.removed=(1, 1)"),
    ({"removed": ((0, 2), (1, 3))}, "spans overlap at tape position 1"),
    ({"inserted": ((2, (0, 1)), (1, (1, 2)))}, "edit.inserted: offsets [2, 1]"),
    ({"inserted": ((0, (3, 3)),)}, "edit.inserted=(3, 3): not a tape span"),
]
BAD_EPISODES = [
    ({"turns": []}, "turns: is empty"),
    ({"reward": math.nan}, "reward=nan"),
    ({"turn_rewards": (1.0,)}, "len(turn_rewards)=1, len(turns)=2"),
    ({"turn_rewards": (1.0, math.inf)}, "turn_rewards="),
    ({"status": "fine"}, "status='fine'"),
    # case 01: an undeclared prefix break in a bridge's record is an error
    ({"edits": ()}, "turn 1: its prompt has 2 tokens, the edited view 3; no edit covers"),
    (
        {"turns": [([1, 2], [3]), ([1, 9, 3], [4])], "edits": ()},
        "prompt_ids[1]=9, but the live view",
    ),
    ({"edits": (Edit(**{**EDIT, "position": 4}),)}, "position=4, but the tape has 3 tokens"),
    ({"edits": (Edit(**{**EDIT, "turn": 2}),)}, "edit.turn=2: the episode has 2 turns"),
    (
        {"edits": (Edit(**{**EDIT, "inserted": ((1, (7, 8)),)}),)},
        "inserted span (7, 8) neither lies on the tape nor starts at its end, 3",
    ),
    ({"edits": (Edit(**{**EDIT, "inserted": ((5, (1, 2)),)}),)}, "offset 5 is beyond the view"),
    ({"edits": (Edit(**{**EDIT, "inserted": ((0, (0, 1)),)}),)}, "already in the view"),
    (
        {
            "turns": [*TWO, ([1, 4], [5])],
            "edits": (
                Edit(**EDIT),
                Edit(**{**EDIT, "turn": 2, "position": 4, "removed": ((1, 3),)}),
            ),
        },
        "removed span (1, 3) is not wholly in the live view",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD_TURNS)
def test_turn(fields, message):
    values = {"prompt": [1, 2], "output": [3], "log_probs": [-0.1], **fields}
    explicit = values.pop("explicit", False)
    with pytest.raises(RecordError) as caught:
        if explicit:
            from harness_bridges.record import Turn

            Turn(
                prompt_ids=[1],
                output_ids=[2],
                output_logprobs=[[-1.0], [-2.0, -3.0]],
                finish_reason="stop",
                weight_version="0",
            )
        turn(values.pop("prompt"), values.pop("output"), values.pop("log_probs"), **values)
    assert message in str(caught.value)


@pytest.mark.parametrize(("fields", "message"), BAD_EDITS)
def test_edit(fields, message):
    with pytest.raises(RecordError) as caught:
        Edit(**{**EDIT, **fields})
    assert message in str(caught.value)


@pytest.mark.parametrize(("fields", "message"), BAD_EPISODES)
def test_episode(fields, message):
    with pytest.raises(RecordError) as caught:
        episode(fields.pop("turns", TWO) if "turns" in fields else TWO, **fields)
    assert message in str(caught.value)


def test_a_declared_edit_is_accepted():
    assert episode(TWO, edits=(Edit(**EDIT),)).num_sampled == 2


def test_a_turn_without_output_is_a_record_of_what_happened():
    assert turn([1], [], finish_reason="abort").sequence.tolist() == [1]


def test_recorded_arrays_cannot_be_changed():
    t = turn(np.array([1, 2]), [3])
    with pytest.raises(ValueError, match="read-only"):
        t.prompt_ids[0] = 5


def test_a_record_shares_nothing_with_its_maker():
    prompt, log_probs = np.array([1, 2, 3]), np.array([-0.5, -1.0])
    t = turn(prompt[:2], [5], log_probs[:1])
    prompt[0], log_probs[0] = 99, np.nan
    assert t.prompt_ids.tolist() == [1, 2] and t.output_logprobs.tolist() == [-0.5]


def test_edits_that_bring_text_and_take_it_away_again_leave_no_hole():
    a = Edit(**{**EDIT, "position": 3, "removed": (), "inserted": ((1, (3, 5)),)})
    b = Edit(**{**EDIT, "position": 5, "removed": ((3, 5),)})
    with pytest.raises(RecordError, match="leave holes in the tape after position 3"):
        episode([([1, 2], [3]), ([1, 2, 3, 4], [5])], edits=(a, b))


def test_errors_survive_pickling():
    for error in (RecordError("a: b"), ConfigError("c")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
