"""Rows, rewards and denominators: the reported cases with their right values."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from support.episodes import edited_episode, episode

from camp_plugin.local.host import make_reducer
from harness_bridges.branches import branches
from harness_bridges.errors import CampError
from harness_bridges.record import Edit
from loss_hooks.method import find_method
from rollout_adapters.samples import (
    Sample,
    convert_samples_to_train_data,
    episode_samples,
    post_process_rewards,
)

HEAD_CUT = Edit(turn=1, position=4, removed=((0, 2),), inserted=(), kind="pop", cause="harness")
CENTRED = SimpleNamespace(grpo_std_normalization=False)
SCALED = SimpleNamespace(grpo_std_normalization=True)


def sample(rollout_id, reward, group=0, mask=(1,), index=0):
    return Sample(
        index=index,
        group_index=group,
        rollout_id=rollout_id,
        tokens=[1] * (len(mask) + 1),
        response_length=len(mask),
        loss_mask=list(mask),
        rollout_log_probs=[-1.0] * len(mask),
        reward=reward,
        truncated=False,
        weight_versions=["0"],
    )


def normalised(samples, args=CENTRED):
    return [round(x, 3) for x in post_process_rewards(args, samples)[1]]


def masks(turns, method="logit_tree"):
    return [
        (row.tokens.tolist(), [0] * row.prompt_length + row.loss_mask.tolist())
        for row in find_method(method).rows(episode(turns))
    ]


def test_case_01_each_call_is_scored_under_its_own_prompt():
    rows = masks([([1], [2, 3]), ([1, 3, 4], [5, 6])])
    assert rows == [([1, 2, 3], [0, 1, 1]), ([1, 3, 4, 5, 6], [0, 0, 0, 1, 1])]


def test_case_02_k_evictions_give_k_plus_1_rows_and_each_token_once():
    two = [([1, 2, 3], [4]), ([1, 3, 4], [5]), ([1, 4, 5], [6]), ([1, 4, 5, 6, 7], [8])]
    assert [mask for _, mask in masks(two)] == [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1, 0, 1]]
    e = edited_episode(0, 97)
    rows = find_method("logit_tree").rows(e)
    assert len(rows) == len(branches(e.turns)) > 3
    assert sum(int(row.loss_mask.sum()) for row in rows) == e.num_sampled


def test_case_03_a_token_on_two_branches_is_owned_by_one_row():
    rows = masks([([9], [1]), ([9, 1], [2]), ([9, 1], [3])])
    assert [mask for _, mask in rows] == [[0, 1, 1], [0, 0, 1]]


def test_case_14_group_mean_over_rollouts_not_rows():
    rows = [sample(0, 1.0)] * 3 + [sample(1, 0.0)]
    assert normalised(rows) == [0.5, 0.5, 0.5, -0.5]
    groups = [sample(0, 1.0), sample(1, 3.0), sample(2, 5.0, group=1)]
    assert normalised(groups, SCALED) == [-0.707, 0.707, 0.0]


def test_case_15_siblings_that_disagree_and_missing_ids():
    with pytest.raises(CampError, match=r"rollout 7: its rows have rewards 1\.0 and 0\.0"):
        normalised([sample(7, 1.0), sample(7, 0.0)])
    assert normalised([sample(7, 3.0)], SCALED) == [0.0]
    assert normalised([sample(None, 1.0), sample(None, 0.0)]) == [0.5, -0.5]
    with pytest.raises(CampError, match="different groups"):
        normalised([sample(1, 1.0, group=0), sample(1, 1.0, group=1)])
    with pytest.raises(CampError, match="reward=nan"):
        normalised([sample(1, math.nan)])


def test_case_16_rollout_mean_is_not_weighted_by_turns():
    rows = [
        sample(r, reward)
        for r, reward, turns in [(0, 1.0, 2), (1, 0.0, 1), (2, 1.0, 2), (3, 0.0, 1)]
        for _ in range(turns)
    ]
    assert set(normalised(rows)) == {0.5, -0.5}


def test_case_17_four_rollouts_of_one_prompt_are_one_group():
    rows = [sample(i, r) for i, r in enumerate([1.0, 0.0, 1.0, 0.0])]
    assert normalised(rows) == [0.5, -0.5, 0.5, -0.5]


def batch_of(samples):
    data = convert_samples_to_train_data(CENTRED, samples)
    return {
        "loss_masks": [torch.tensor(m) for m in data["loss_masks"]],
        "rollout_mask_sums": [torch.tensor(float(s)) for s in data["rollout_mask_sums"]],
        "response_lengths": data["response_lengths"],
    }


def pick(batch, rows):
    return {key: [values[i] for i in rows] for key, values in batch.items()}


def test_case_18_one_token_mean_per_rollout_wherever_its_rows_land():
    # A: legs of 2, 4, 6 tokens, loss 1; B: 4 tokens, loss 2 -> per-rollout mean 1.5
    legs = [sample(0, 0.0, mask=(1,) * n) for n in (2, 4, 6)] + [sample(1, 0.0, mask=(1,) * 4)]
    batch = batch_of(legs)
    values = torch.tensor([1.0] * 12 + [2.0] * 4)
    assert float(make_reducer(batch)(values)) / 2 == pytest.approx(1.5)
    first, second = pick(batch, [0, 3]), pick(batch, [1, 2])
    split = make_reducer(first)(torch.tensor([1.0, 1, 2, 2, 2, 2])) + make_reducer(second)(
        torch.ones(10)
    )
    assert float(split) / 2 == pytest.approx(1.5)


def test_case_19_the_divisor_counts_the_mask_not_the_response():
    mask = (1, 0, 1, 0, 0, 1, 0, 0, 0, 1)
    batch = batch_of([sample(0, 0.0, mask=mask)])
    assert batch["rollout_mask_sums"][0] == 4
    assert float(make_reducer(batch)(torch.ones(10))) == 1.0


def test_case_11_a_masked_dummy_row_changes_nothing():
    real = [sample(0, 1.0, mask=(1, 1)), sample(1, 0.0, mask=(1,))]
    dummy = sample(2, 0.0, group=9, mask=(0,))
    values = torch.tensor([3.0, 5.0, 7.0])
    alone = make_reducer(batch_of(real))(values)
    padded = make_reducer(batch_of([*real, dummy]))(torch.cat([values, torch.tensor([math.nan])]))
    assert alone == padded
    assert normalised([*real, dummy])[:2] == normalised(real)


def test_case_41_nan_under_a_zero_mask_does_not_reach_the_sum():
    batch = batch_of([sample(0, 0.0, mask=(1, 0))])
    assert float(make_reducer(batch)(torch.tensor([2.0, math.nan]))) == 2.0


def test_rows_inherit_the_whole_reward_and_share_the_rollout():
    e = edited_episode(0, 97, rollout_id=5, reward=0.25)
    samples = episode_samples(e, find_method("logit_tree"))
    assert len(samples) > 2
    assert {(s.rollout_id, s.reward, s.group_index) for s in samples} == {(5, 0.25, 0)}
    data = convert_samples_to_train_data(CENTRED, samples)
    assert set(data["rollout_mask_sums"]) == {e.num_sampled}
    assert len(set(data["rollout_ids"])) == 1


def test_masked_slots_carry_nan_and_never_zero():
    row = find_method("logit_tree").rows(episode([([1], [2]), ([1, 2, 3], [4])]))[0]
    assert row.loss_mask.tolist() == [1, 0, 1]
    assert [math.isnan(x) for x in row.rollout_log_probs] == [False, True, False]


def test_a_rewards_dict_is_read_as_slime_reads_it():
    class Slime:
        group_index, rollout_id = 0, None

        def __init__(self, value):
            self.reward = {"acc": value}

        def get_reward_value(self, args):
            return self.reward[args.reward_key]

    args = SimpleNamespace(grpo_std_normalization=False, reward_key="acc")
    assert post_process_rewards(args, [Slime(1.0), Slime(0.0)]) == ([1.0, 0.0], [0.5, -0.5])


def test_a_sampled_token_at_the_head_of_the_walk_is_no_target():
    e = episode([([1, 2], [3, 4]), ([3, 4], [5])], edits=(HEAD_CUT,))
    (row,) = find_method("naive_compressed").rows(e)
    assert row.tokens.tolist() == [3, 4, 5] and row.loss_mask.tolist() == [1, 1]
    (row,) = find_method("sdcc").rows(e)
    assert row.record["leaf_rows"] == [0]


def test_the_record_travels_as_json_in_the_carrier():
    (s,) = episode_samples(edited_episode(1, 97), find_method("sdcc"))
    data = convert_samples_to_train_data(CENTRED, [s])
    record = json.loads(data["prompt"][0])
    assert record["method"] == "sdcc" and record["leaf_rows"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: convert_samples_to_train_data(CENTRED, []), "samples: is empty"),
        (
            lambda: episode_samples(episode([([1], [])]), find_method("logit_tree")),
            "has no sampled token",
        ),
        (
            lambda: episode_samples(episode([([1], [2])], reward=None), find_method("logit_tree")),
            "reward is None",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(build, message):
    with pytest.raises(CampError, match=message):
        build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1, 1]}, r"len\(loss_mask\)=2, response_length=1"),
        ({"rollout_log_probs": []}, r"len\(rollout_log_probs\)=0, response_length=1"),
        ({"tokens": [1]}, r"response_length=1 of 1 tokens"),
    ],
)
def test_rows_whose_lists_differ_are_refused(change, message):
    bad = sample(0, 0.0)
    for name, value in change.items():
        setattr(bad, name, value)
    with pytest.raises(CampError, match=message):
        convert_samples_to_train_data(CENTRED, [bad])
