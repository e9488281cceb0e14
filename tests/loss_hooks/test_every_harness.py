"""Method x harness: every method trains on every harness's episodes, the exact ones exactly."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from support.episodes import with_log_probs
from support.gradients import ALL, EXACT, assert_same_gradients, gradients, oracle_loss
from support.harnesses import WHITE_BOX, World, make, play
from support.models import tiny_model, tiny_tokenizer
from support.oracle import turn_log_probs

from camp_plugin.local.host import LocalHost
from camp_plugin.probe import target_log_probs
from harness_bridges.branches import branches, episode_tape, survivors
from harness_bridges.errors import ConfigError
from harness_bridges.harness import find_harness
from loss_hooks.method import find_method
from rollout_adapters.metrics import episode_metrics

BIG = "0123456789" * 45


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab=len(tiny_tokenizer()), layers=2)


@pytest.fixture(scope="module")
def groups(model):
    """Two short episodes per harness, made once, with log-probs that lie off the policy."""
    cache = {}

    def group(name):
        if name not in cache:
            cache[name] = [_episode(name, seed, model) for seed in range(2)]
        return cache[name]

    return group


def _policy(name):
    demonstrate = getattr(find_harness(name), "demonstrate", lambda turn, prompt: "")

    def say(turn, prompt):
        forced = demonstrate(turn, prompt)
        return f"summary {turn}" if forced is None else forced or f"<search>q{turn}</search>"

    return [say]


def _episode(name, seed, model):
    long = name in ("file_memory", "memory_tools", "compaction")
    harness = make(name, boundary_observation_tokens=32, agentfold_threshold=200,
                   agentfold_summary_tokens=30, tc_rag_budget=None)  # fmt: skip
    limits = {"max_turns": 5, "max_new_tokens": 120, "max_context": 1200}
    if long:
        with pytest.raises(ConfigError) as refused:
            play(harness, ["x"], **{**limits, "max_context": 300})
        needed = int(re.search(r"need at least (\d+)", str(refused.value))[1])
        limits["max_context"] = needed + 66
    world = World([f"{seed}{BIG}" for _ in range(3)] if long else ())
    e, _ = play(harness, _policy(name), world=world, unique=True, **limits)
    rng = np.random.default_rng(seed)
    weights = {key: p.detach() for key, p in model.named_parameters()}
    noisy = [
        np.minimum(turn_log_probs(weights, model.config, t).numpy() + rng.normal(0, 0.4, n), 0)
        for t in e.turns
        for n in [t.output_ids.size]
    ]
    e = with_log_probs(e, noisy)
    return dataclasses.replace(e, rollout_id=seed, reward=float(seed), turn_rewards=())


@pytest.mark.parametrize("name", WHITE_BOX)
def test_there_is_something_to_test(groups, name):
    edits = [edit for e in groups(name) for edit in e.edits]
    assert bool(edits) == (name != "search_r1")


@pytest.mark.parametrize("name", WHITE_BOX)
@pytest.mark.parametrize("method", EXACT)
def test_log_probs_are_those_of_the_plain_forward(groups, model, name, method):
    weights = {key: p.detach() for key, p in model.named_parameters()}
    for e in groups(name):
        expected = torch.cat([turn_log_probs(weights, model.config, t) for t in e.turns]).numpy()
        found, _ = target_log_probs(e, find_method(method), LocalHost(model), 1.0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", WHITE_BOX)
def test_every_method_trains_and_the_exact_ones_have_the_exact_gradient(groups, model, name):
    episodes = groups(name)
    expected_loss, expected = oracle_loss(model, episodes)
    for method in ALL:
        model.zero_grad()
        loss, found, _ = gradients(model, method, episodes)
        assert math.isfinite(loss)
        assert all(bool(torch.isfinite(g).all()) for g in found.values())
        if method in EXACT or name == "search_r1":
            assert abs(loss - expected_loss) <= 1e-9, method
            assert_same_gradients(found, expected, 1e-8)


def evicted_by_hand(e):
    """(share of the tape that ever left a view, branches), from sets of tape positions."""
    tape = episode_tape(e)
    gone, count = set(), 1
    for turn in range(1, len(e.turns)):
        before = set(tape.positions(turn - 1, output=True).tolist())
        gone |= before - set(tape.positions(turn).tolist())
        path = e.turns[turn - 1].sequence.tolist()
        count += e.turns[turn].prompt_ids.tolist()[: len(path)] != path
    return len(gone) / tape.tokens.size, count


@pytest.mark.parametrize("name", WHITE_BOX)
def test_metrics_are_those_of_the_papers_tables(groups, name):
    """002, Tables 10 and 11, and metric 5."""
    episodes = groups(name)
    found = episode_metrics(episodes)
    evicted, segments = zip(*map(evicted_by_hand, episodes), strict=True)
    some = [c for c in evicted if c > 0]
    assert found["camp/sessions"] == 2 and found["camp/evict_sessions"] == len(some)
    assert found["camp/evict_ratio"] == pytest.approx(sum(evicted) / 2)
    assert found["camp/edit_freq"] == len(some) / 2
    assert found["camp/segments"] == sum(segments) / 2
    if not some:
        assert math.isnan(found["camp/edit_depth"])
    else:
        assert found["camp/edit_depth"] == pytest.approx(sum(some) / len(some))
    prefixes = [
        {t.sequence[:i].tobytes() for t in e.turns for i in range(1, t.sequence.size + 1)}
        for e in episodes
    ]
    trie = sum(map(len, prefixes))
    replicated = sum(e.turns[leg.last].sequence.size for e in episodes for leg in branches(e.turns))
    assert found["camp/pack_ratio"] == pytest.approx(trie / replicated)


@pytest.mark.parametrize("name", ("search_r1", "agentfold", "file_memory"))
def test_act_and_pack_count_micro_batches(groups, model, name):
    """One row fills a micro-batch of this size, so a micro-batch is an episode."""
    episodes = groups(name)
    _, _, metrics = gradients(model, "sdcc", episodes, max_tokens_per_gpu=1)
    leaves = [survivors(e.turns, episode_tape(e)).diverges.any() for e in episodes]
    assert metrics["camp/leaf_active"] == sum(leaves) / 2
    assert metrics["rows_per_batch"] == 1.0
    _, _, packed = gradients(model, "packed_mask", episodes, max_tokens_per_gpu=10**6)
    assert packed["rows_per_batch"] == 2.0
    assert "camp/leaf_active" not in packed
