"""The embedded trainer: steps, ratios, refusals, reference KL."""

import math

import numpy as np
import pytest
import torch
from support.episodes import edited_episode, episode, turn
from support.models import VOCAB, tiny_model

from camp_plugin.local.config import build_config
from camp_plugin.local.trainer import Trainer
from harness_bridges.errors import CampError

ALL = ("naive_compressed", "naive_full", "logit_tree", "packed_mask", "sdcc")


def args(method="logit_tree", **overrides):
    values = {
        "hf_checkpoint": "x",
        "camp_method": method,
        "lr": 1e-3,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "global_batch_size": 4,
    }
    return build_config({**values, **overrides})


def four(rewards=(1.0, 0.0, 1.0, 0.5)):
    return [
        edited_episode(i, VOCAB, trunk=20, rollout_id=i, group_id=i // 2, reward=rewards[i])
        for i in range(4)
    ]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("method", ALL)
def test_one_step_trains_every_rollout_whatever_its_rows(method):
    model = tiny_model("llama", float64=False)
    before = weights(model)
    trainer = Trainer(args(method), model)
    (metrics,) = trainer.train(four(), 0)
    assert trainer.updates == 1
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert any(not torch.equal(before[n], p) for n, p in model.named_parameters())


def test_case_13_steps_count_rollouts_not_rows():
    # 2 prompts x 2 rollouts with 1, 2, 3, 1 legs = 7 rows: exactly one optimizer step
    legs = [[([1, 2], [3])] * n for n in (1, 2, 3, 1)]
    episodes = [
        episode(turns, rollout_id=i, group_id=i // 2, reward=float(i % 2))
        for i, turns in enumerate(legs)
    ]
    trainer = Trainer(args(), tiny_model("llama"))
    data = trainer.prepare(episodes, 0)
    assert len(data["tokens"]) == 7 and set(data["step_ids"]) == {0}
    assert len(trainer.train(episodes, 0)) == trainer.updates == 1


@pytest.mark.parametrize("method", ALL)
def test_several_steps_use_the_policy_before_the_first_as_old_policy(method):
    trainer = Trainer(args(method, global_batch_size=2), tiny_model("llama", float64=False))
    first, second = trainer.train(four(), 0)
    assert abs(first["ppo_kl"]) < 1e-6, "the weights have not moved yet"
    assert abs(second["ppo_kl"]) > 1e-5
    assert first["camp/logdiff_mean"] == second["camp/logdiff_mean"]


@pytest.mark.parametrize("method", ("logit_tree", "packed_mask"))
def test_drift_is_zero_if_the_record_has_the_models_own_log_probs(method):
    from camp_plugin.local.host import LocalHost
    from camp_plugin.probe import target_log_probs
    from loss_hooks.method import find_method

    model = tiny_model("llama")
    raw = four()
    exact = []
    for e in raw:
        log_probs = target_log_probs(e, find_method("logit_tree"), LocalHost(model), 1.0)[0]
        parts = np.split(log_probs, np.cumsum([t.output_ids.size for t in e.turns])[:-1])
        turns = [turn(t.prompt_ids, t.output_ids, lp) for t, lp in zip(e.turns, parts, strict=True)]
        ids = {"rollout_id": e.rollout_id, "group_id": e.group_id, "reward": e.reward}
        exact.append(episode(turns, **ids))
    (metrics,) = Trainer(args(method), model).train(exact, 0)
    assert metrics["camp/logdiff_max"] < 1e-9


def test_kl_to_a_reference_pulls_the_policy_back():
    policy, reference = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    same = [four((1.0, 1.0, 0.0, 0.0))][0]
    settings = args(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3")
    (metrics,) = Trainer(settings, policy, reference).train(same, 0)
    assert metrics["kl_loss"] > 0 and metrics["grad_norm"] > 0
    (at_home,) = Trainer(settings, tiny_model("llama", seed=2), reference).train(same, 0)
    assert abs(at_home["kl_loss"]) < 1e-12 and at_home["grad_norm"] < 1e-9


def test_reference_kl_without_a_reference_is_refused():
    with pytest.raises(CampError, match="without a reference model"):
        Trainer(args(use_kl_loss=True), tiny_model("llama")).train(four(), 0)


@pytest.mark.parametrize("method", ALL)
def test_a_non_finite_loss_is_refused_and_no_weight_moves(method):
    model = tiny_model("llama", float64=False)
    with torch.no_grad():
        model.lm_head.weight[0] = math.nan
    before = weights(model)
    with pytest.raises(
        CampError, match=r"loss=nan on rollouts|step was not taken|KL is not finite"
    ):
        Trainer(args(method), model).train(four(), 0)
    for name, p in model.named_parameters():
        assert torch.equal(before[name].nan_to_num(), p.nan_to_num()), name


@pytest.mark.parametrize("method", ("naive_compressed", "sdcc"))
def test_case_42_a_walk_without_survivors_is_an_all_masked_row(method):
    lost = [([1, 2, 3], [4, 5]), ([6, 7, 8], [])]  # all that was sampled left the context
    episodes = [episode(lost, rollout_id=0, reward=1.0)]
    episodes.append(episode([([1, 2, 3], [4, 5])], rollout_id=1, reward=0.0))
    settings = args(method, rollout_batch_size=1, global_batch_size=2)
    (metrics,) = Trainer(settings, tiny_model("llama")).train(episodes, 0)
    assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
    assert metrics["loss_tokens"] == 2 and metrics["masked_rows"] == 1
    alone = args(method, rollout_batch_size=1, n_samples_per_prompt=1, global_batch_size=1)
    (metrics,) = Trainer(alone, tiny_model("llama")).train(episodes[:1], 0)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["loss_tokens"] == 0


def test_episodes_that_do_not_fill_the_steps_are_refused_not_dropped():
    with pytest.raises(CampError, match="3 episodes do not fill steps of global_batch_size=4"):
        Trainer(args(), tiny_model("llama")).train(four()[:3], 0)


def test_episodes_that_cannot_be_told_apart_or_were_not_finished_are_refused():
    twice = [*four()[:2], *four()[:2]]
    with pytest.raises(CampError, match="rollout_id=0: several episodes have it"):
        Trainer(args(), tiny_model("llama")).train(twice, 0)
    broken = [*four()[:3], edited_episode(3, VOCAB, rollout_id=3, group_id=1, status="aborted")]
    with pytest.raises(CampError, match="episode 3: was not finished"):
        Trainer(args(), tiny_model("llama")).train(broken, 0)


def test_another_temperature_than_the_recorded_one_is_refused():
    hot = [edited_episode(i, VOCAB, rollout_id=i, metadata={"temperature": 0.5}) for i in range(4)]
    with pytest.raises(CampError, match=r"sampled at temperature 0\.5, rollout_temperature=1\.0"):
        Trainer(args(), tiny_model("llama")).train(hot, 0)


def test_episodes_of_another_vocabulary_are_refused():
    foreign = [edited_episode(i, 500, rollout_id=i, group_id=i // 2) for i in range(4)]
    with pytest.raises(CampError, match="not in the model's vocabulary of 61"):
        Trainer(args(), tiny_model("llama")).train(foreign, 0)


@pytest.mark.parametrize("method", ALL)
def test_the_facades_hook_is_the_one_that_trains(method):
    import camp_plugin
    from loss_hooks.method import find_method

    assert getattr(camp_plugin, method) is find_method(method).loss
    assert find_method("sdcc").before_train_step is camp_plugin.sdcc_before_train_step


def test_hooks_of_another_method_are_refused():
    from loss_hooks.host import use_host
    from loss_hooks.packed_mask import loss

    trainer = Trainer(args("logit_tree"), tiny_model("llama"))
    with use_host(trainer.host):
        data = trainer.prepare(four(), 0)
        (batch, *_) = trainer.micro_batches({**data, "log_probs": None, "ref_log_probs": None}, 0)
        with pytest.raises(CampError, match=r"packed_mask loss got a row of .* record none"):
            loss(trainer.args, batch, trainer.host.logits(batch), sum)


def test_a_hook_outside_a_host_says_so():
    from loss_hooks.naive import policy_loss

    with pytest.raises(CampError, match="no host is active"):
        policy_loss(None, {}, None, None)


def test_an_unsupported_model_is_refused_at_the_start():
    from camp_plugin.local.host import LocalHost

    model = tiny_model("llama")
    model.config.logits_scaling = 8.0
    with pytest.raises(CampError, match="logits_scaling"):
        LocalHost(model)
    window = tiny_model("llama")
    window.model.layers[1].self_attn.forward = window.model.layers[0].self_attn.forward
    original = window.model.layers[1].self_attn.forward

    def blind(*args, **kwargs):
        kwargs.pop("camp_layout", None)
        return original(*args, **kwargs)

    window.model.layers[1].self_attn.forward = blind
    with pytest.raises(CampError, match="layout did not reach"):
        LocalHost(window)


def test_a_path_beyond_the_models_context_is_refused():
    model = tiny_model("llama")
    model.config.max_position_embeddings = 16
    with pytest.raises(CampError, match="max_position_embeddings=16"):
        Trainer(args(), model).train(four(), 0)
