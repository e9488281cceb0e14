"""The policy loss: slime's numbers, closed forms, and NaN under a zero mask."""

import math

import pytest
import torch

from harness_bridges.errors import ConfigError
from loss_hooks.policy_loss import (
    PolicyLossConfig,
    approx_kl,
    policy_terms,
    reduce_policy_terms,
)

# Input, and what slime 624b824a's compute_policy_loss(ppo_kl, adv, 0.2, 0.28, c) and
# compute_approx_kl return for it (torch.compile off, float64; its KL casts to float32).
LOG_PROBS = [-1.0, -0.5, -2.0, -0.1, -3.0, -1.5, -0.9, -0.2]
OLD = [-1.2, -0.9, -1.0, -0.1, -5.0, -1.4, -0.3, -2.2]
ADVANTAGES = [1.0, 1.0, 0.5, -0.7, -1.0, -0.3, 2.0, -2.0]
REF = [-1.1, -0.6, -1.5, -0.3, -16.0, -1.5, -0.8, -0.2]
HEAD = [-1.2214027581601699, -1.28, -0.18393972058572117, 0.7]
TAIL = [7.38905609893065, 0.27145122541078787, -1.0976232721880528, 14.7781121978613]
TAIL_DUAL = [3.0, 0.27145122541078787, -1.0976232721880528, 6.0]
GRAD_HEAD = [-1.2214027581601699, 0.0, -0.18393972058572117, 0.7]
GRAD_DUAL = [0.0, 0.27145122541078787, -1.0976232721880528, 0.0]
KL = {
    "k1": [0.10000002384, 0.10000002384, -0.5, 0.20000001788, 13.0, 0.0, -0.09999996424, 0.0],
    "k2": [0.00500000222, 0.00500000222, 0.125, 0.02000000328, 84.5, 0.0, 0.00499999663, 0.0],
    "k3": [
        0.00483739376,
        0.00483739376,
        0.14872121811,
        0.01873072982,
        12.0000019,
        0,
        0.00517088,
        0,
    ],
    "low_var_kl": [
        0.00483739376,
        0.00483739376,
        0.14872121811,
        0.01873072982,
        10,
        0,
        0.00517088,
        0,
    ],
}


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def terms(config, log_probs=LOG_PROBS, old=OLD, advantages=ADVANTAGES, mask=None, ref=None):
    mask = [1] * len(log_probs) if mask is None else mask
    log_probs = log_probs if isinstance(log_probs, torch.Tensor) else tensor(log_probs)
    return policy_terms(
        config,
        log_probs=log_probs,
        old_log_probs=tensor(old),
        advantages=tensor(advantages),
        mask=tensor(mask) > 0,
        ref_log_probs=None if ref is None else tensor(ref),
    )


@pytest.mark.parametrize(
    ("dual", "loss", "gradient"),
    [(None, HEAD + TAIL, GRAD_HEAD + TAIL), (3.0, HEAD + TAIL_DUAL, GRAD_HEAD + GRAD_DUAL)],
)
def test_equals_slime(dual, loss, gradient):
    log_probs = tensor(LOG_PROBS).requires_grad_()
    found = terms(PolicyLossConfig(eps_clip_c=dual), log_probs)
    (grad,) = torch.autograd.grad(found.pg_loss.sum(), log_probs)
    torch.testing.assert_close(found.pg_loss, tensor(loss))
    torch.testing.assert_close(grad, tensor(gradient))
    assert found.pg_clipfrac.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", KL)
def test_kl_estimators_equal_slime(kind):
    torch.testing.assert_close(
        approx_kl(tensor(LOG_PROBS), tensor(REF), kind), tensor(KL[kind]), rtol=1e-6, atol=1e-7
    )


def test_case_28_values_of_the_estimators():
    # pi = .5, p = .25: k1 .6931, k2 .2402, k3 .1931
    lp, ref = tensor([math.log(0.5)]), tensor([math.log(0.25)])
    for kind, value in {"k1": 0.6931, "k2": 0.2402, "k3": 0.1931}.items():
        assert abs(float(approx_kl(lp, ref, kind)) - value) < 1e-4


def test_total_loss_is_pg_minus_entropy_plus_kl():
    config = PolicyLossConfig(use_kl_loss=True, kl_loss_coef=0.5, entropy_coef=0.25)
    found = terms(config, ref=REF)
    entropy = torch.full((8,), 2.0, dtype=torch.float64)
    loss, metrics = reduce_policy_terms(config, found, entropy, lambda x: x.sum())
    expected = sum(HEAD + TAIL) - 0.25 * 16 + 0.5 * sum(KL["low_var_kl"])
    assert abs(float(loss) - expected) < 1e-5
    names = ["loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "tis"]
    assert list(metrics) == names


def test_case_41_nan_under_a_zero_mask_reaches_neither_value_nor_gradient():
    # lp = [0, 0], old = [0, NaN], A = [1, 1], m = [1, 0] -> finite
    log_probs = tensor([0.0, 0.0]).requires_grad_()
    config = PolicyLossConfig(use_kl_loss=True)
    found = terms(config, log_probs, [0.0, math.nan], [1.0, math.nan], [1, 0], [0.0, math.nan])
    assert found.pg_loss.tolist() == [-1.0, 0.0]
    (grad,) = torch.autograd.grad((found.pg_loss + found.kl_loss).sum(), log_probs)
    assert grad.tolist() == [-1.0, 0.0]


def test_case_39_importance_weights_have_the_old_policy_in_the_numerator():
    # old / rollout ratios, of which all but the first and last are clipped to [0.5, 2]
    ratios = [1.105, 0.223, 2.226, 5e-5, 1.350]
    old = tensor([-1.0] * 5)
    current = tensor([-3.0, -2.0, -1.0, -0.5, -0.1])
    rollout = old - tensor(ratios).log()
    config = PolicyLossConfig(use_tis=True, tis_clip=2.0, tis_clip_low=0.5)
    ones = torch.ones(5, dtype=torch.float64)
    settings = {"log_probs": current, "old_log_probs": old, "advantages": ones, "mask": ones > 0}
    plain = policy_terms(PolicyLossConfig(), **settings)
    found = policy_terms(config, rollout_log_probs=rollout, **settings)
    torch.testing.assert_close(found.tis, tensor(ratios))
    weights = tensor([1.105, 0.5, 2.0, 0.5, 1.350])
    torch.testing.assert_close(found.pg_loss, plain.pg_loss * weights)


def test_kl_loss_without_reference_is_refused():
    with pytest.raises(ConfigError, match="ref_log_probs"):
        terms(PolicyLossConfig(use_kl_loss=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eps_clip", 1.0),
        ("eps_clip_high", -0.1),
        ("eps_clip_c", 1.0),
        ("kl_loss_type", "k9"),
        ("tis_clip", 0.0),
    ],
)
def test_bad_settings_name_field_and_value(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value!r}"):
        PolicyLossConfig(**{field: value})
