"""Log-probs, loss and gradients of the exact methods against a plain float64 forward.

The oracle recomputes every sampled token on its own recorded prompt; it shares no code with the
packed forward, the losses or transformers.
"""

import numpy as np
import pytest
import torch
from support.episodes import edited_episode, episode, with_log_probs
from support.gradients import (
    ALL,
    EXACT,
    assert_same_gradients,
    gradients,
    leaf_weights,
    oracle_loss,
)
from support.models import VOCAB, tiny_model
from support.oracle import plain_logits, turn_log_probs

from harness_bridges.branches import episode_tape, survivors
from loss_hooks.method import find_method

KINDS = ("llama", "qwen3")


def group(model, trunks=(57, 60, 63)):
    """A GRPO group whose recorded log-probs lie off the policy, so that ratios clip."""
    rng = np.random.default_rng(7)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = []
    for i, trunk in enumerate(trunks):
        raw = edited_episode(i, VOCAB, trunk=trunk, rollout_id=i, reward=[1.0, 0.0, 0.2][i])
        noisy = [
            np.minimum(turn_log_probs(weights, model.config, t).numpy() + rng.normal(0, 0.4, n), 0)
            for t in raw.turns
            for n in [t.output_ids.size]
        ]
        found.append(with_log_probs(raw, noisy))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", EXACT)
def test_loss_and_gradients_equal_the_oracle(kind, method):
    model = tiny_model(kind)
    episodes = group(model)
    loss, found, _ = gradients(model, method, episodes)
    expected_loss, expected = oracle_loss(model, episodes)
    assert abs(loss - expected_loss) <= 1e-9
    assert_same_gradients(found, expected, 1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("trunk", range(57, 64))
def test_log_probs_equal_the_oracle_and_each_token_is_one_target(kind, method, trunk):
    model = tiny_model(kind)
    e = edited_episode(trunk, VOCAB, trunk=trunk)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = torch.cat([turn_log_probs(weights, model.config, t) for t in e.turns]).numpy()
    found = scored_targets(model, method, e)
    assert found.size == e.num_sampled
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def scored_targets(model, method, e):
    """The method's log-probs of its targets, in the order in which they were sampled."""
    from camp_plugin.local.host import LocalHost
    from camp_plugin.probe import target_log_probs

    return target_log_probs(e, find_method(method), LocalHost(model), 1.0)[0]


def test_the_fixture_has_what_it_promises():
    starts = set()
    for trunk in range(57, 64):
        e = edited_episode(trunk, VOCAB, trunk=trunk)
        left = survivors(e.turns, episode_tape(e))
        assert left.diverges.any() and not left.diverges.all()
        (row,) = find_method("packed_mask").rows(e)
        nodes, targets = row.record["tree"]["nodes"], row.record["targets"]
        starts |= {start % 64 for start, _, _ in nodes}
        assert len(set(targets)) < len(targets), "a token sampled twice on one path"
        depth = max(sum(a <= s and s < c for a, _, c in nodes) for s, _, _ in nodes)
        assert depth >= 4, "forks below forks below forks"
    assert set(range(57, 64)) <= starts


def test_packed_length_is_the_number_of_distinct_prefixes():
    e = edited_episode(3, VOCAB, trunk=61)
    (row,) = find_method("packed_mask").rows(e)
    prefixes = {
        tuple(t.sequence[: i + 1].tolist()) for t in e.turns for i in range(t.sequence.size)
    }
    assert row.tokens.size == len(prefixes)


def test_case_08_survivors_after_an_interior_eviction_are_copied():
    # live = 1 2 5 8 after the span 3 4 was evicted; 5 was first computed while seeing it.
    model = tiny_model("llama")
    e = episode([([1, 2, 3, 4], [5]), ([1, 2, 5], [8])])
    (row,) = find_method("packed_mask").rows(e)
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 5, 8]
    assert row.record["tree"]["positions"] == [0, 1, 2, 3, 4, 2, 3]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = torch.cat([turn_log_probs(weights, model.config, t) for t in e.turns]).numpy()
    np.testing.assert_allclose(scored_targets(model, "packed_mask", e), expected, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_without_edits_all_methods_give_the_same_loss_and_gradients(kind):
    model = tiny_model(kind)
    base = [
        episode(
            [(list(range(9)), [11, 12, 13]), ([*range(9), 11, 12, 13, 20, 21], [14 + i, 15])],
            rollout_id=i,
            reward=float(i),
        )
        for i in range(3)
    ]
    results = {method: gradients(model, method, base) for method in ALL}
    reference_loss, reference, _ = results["naive_compressed"]
    for method, (loss, found, _) in results.items():
        assert abs(loss - reference_loss) <= 1e-10, method
        assert_same_gradients(found, reference, 1e-9)


def test_naive_methods_are_wrong_where_the_context_was_edited():
    model = tiny_model("llama")
    e = edited_episode(5, VOCAB)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    exact = torch.cat([turn_log_probs(weights, model.config, t) for t in e.turns]).numpy()
    full = scored_targets(model, "naive_full", e)
    assert np.abs(full - exact).max() > 0.1
    left = survivors(e.turns, episode_tape(e))
    starts = np.cumsum([0, *(t.output_ids.size for t in e.turns)])
    live = exact[starts[left.turn] + left.offset]
    drift = np.abs(scored_targets(model, "naive_compressed", e) - live)
    assert drift[left.diverges].max() > 0.1
    assert drift[~left.diverges].max(initial=0.0) <= 1e-9


def test_sdcc_at_lambda_zero_is_naive_compressed_bit_for_bit():
    model = tiny_model("qwen3")
    episodes = group(model)
    naive_loss, naive, _ = gradients(model, "naive_compressed", episodes)
    loss, found, metrics = gradients(model, "sdcc", episodes, sdcc_lambda=0.0)
    assert loss == naive_loss
    assert metrics["camp/lambda"] == 0.0 and metrics["camp/leaves"] > 0
    for name, gradient in naive.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ("sum", "mean"))
def test_sdcc_adds_the_forward_kl_of_eq_10(kind, reduction):
    model = tiny_model(kind)
    episodes = group(model)
    task_loss, task, _ = gradients(model, "naive_compressed", episodes)
    weights = leaf_weights(model)
    frozen = {name: w.detach() for name, w in weights.items()}
    total = torch.zeros((), dtype=torch.float64)
    for e in episodes:
        total = total + oracle_kl(weights, frozen, model.config, e, reduction)
    penalty = 0.1 * total / len(episodes)
    penalty.backward()
    loss, found, _ = gradients(model, "sdcc", episodes, sdcc_reduction=reduction)
    assert abs(loss - task_loss - float(penalty.detach())) <= 1e-9
    expected = {name: task[name] + w.grad for name, w in weights.items()}
    assert_same_gradients(found, expected, 1e-8)


def oracle_kl(weights, frozen, config, e, reduction):
    """KL by the definition at every survivor whose two prefixes differ as token lists."""
    walk = e.turns[-1].sequence.tolist()
    student = torch.log_softmax(plain_logits(weights, config, walk), -1)
    left = survivors(e.turns, episode_tape(e))
    terms = []
    for at, index, offset in zip(left.position, left.turn, left.offset, strict=True):
        live = e.turns[index].sequence[: e.turns[index].prompt_ids.size + offset].tolist()
        if live == walk[:at]:
            continue
        teacher = torch.log_softmax(plain_logits(frozen, config, live)[-1], -1)
        terms.append((teacher.exp() * (teacher - student[at - 1])).sum())
    assert terms
    return sum(terms) / (len(terms) if reduction == "mean" else 1)


@pytest.mark.parametrize("method", ALL)
def test_micro_batch_size_does_not_change_loss_or_gradients(method):
    model = tiny_model("llama")
    episodes = group(model)
    one = gradients(model, method, episodes, max_tokens_per_gpu=100000)
    many = gradients(model, method, episodes, max_tokens_per_gpu=1)
    assert abs(one[0] - many[0]) <= 1e-12
    assert_same_gradients(many[1], one[1], 1e-9)
