"""Log-probs, entropy and full-vocabulary forward KL against their definitions."""

import math
from types import SimpleNamespace

import pytest
import torch

from loss_hooks import token_stats as module
from loss_hooks.token_stats import Leaves, TeacherRows, forward_kl, token_stats

V, H, T, D = 37, 8, 11, 6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Three rows a chunk, so that every test crosses chunk borders."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 3 * V * 8)


def example(seed=0, scale=2.0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(T, V, generator=g, dtype=torch.float64) * scale).requires_grad_()
    rows = torch.tensor([0, 3, 3, 5, 10, 9, 1])
    targets = torch.randint(0, V, (rows.numel(),), generator=g)
    hidden = torch.randn(D, H, generator=g, dtype=torch.float64)
    weight = torch.randn(V, H, generator=g, dtype=torch.float64)
    leaves = Leaves(torch.tensor([2, 3, 4, 10, 10, 0]), TeacherRows(hidden, weight))
    return logits, rows, targets, leaves


def definition(logits, rows, targets, leaves, temperature):
    log_q = torch.log_softmax(logits / temperature, -1)
    log_p = torch.log_softmax(leaves.teacher.hidden @ leaves.teacher.weight.T / temperature, -1)
    chosen = log_q[rows]
    kl = (log_p.exp() * (log_p - log_q[leaves.rows])).sum(-1)
    return chosen[torch.arange(rows.numel()), targets], -(chosen.exp() * chosen).sum(-1), kl


@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_values_and_gradient_equal_the_definition(temperature):
    logits, rows, targets, leaves = example()
    found = token_stats(logits, rows, targets, leaves=leaves, temperature=temperature)
    expected = definition(logits, rows, targets, leaves, temperature)
    weights = [torch.linspace(-1, 2, x.numel(), dtype=torch.float64) for x in expected]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    grads = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, xs, strict=True)), logits)[0]
        for xs in (found, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", (1e-6, 1e-4, 1e-2, 1.0, 30.0))
def test_kl_is_right_and_not_negative_at_every_size_in_float32(scale):
    g = torch.Generator().manual_seed(3)
    student = torch.randn(64, 997, generator=g) * 3
    teacher = student + scale * torch.randn(64, 997, generator=g)
    log_q = torch.log_softmax(student.double(), -1)
    log_p = torch.log_softmax(teacher.double(), -1)
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)
    found = forward_kl(student, teacher)
    assert float(found.min()) >= 0
    # The log-softmax form errs by 1e-6 here, whatever the KL.
    assert float((found - exact).abs().max()) <= 3e-11 + 5e-5 * float(exact.max())


def test_equal_student_and_teacher_give_zero_and_zero_gradient():
    logits, rows, targets, _ = example()
    same = Leaves(
        torch.tensor([1, 4]), TeacherRows(torch.eye(2), logits.detach()[[1, 4]].T.float())
    )
    student = logits.detach().float().requires_grad_()
    kl = token_stats(student, rows[:0], targets[:0], leaves=same, temperature=0.6).leaf_kl
    (grad,) = torch.autograd.grad(kl.sum(), student)
    assert kl.tolist() == [0.0, 0.0]
    assert not grad.any()


def test_no_gradient_reaches_the_teacher():
    logits, rows, targets, leaves = example()
    for part in (leaves.teacher.hidden, leaves.teacher.weight):
        part.requires_grad_()
    token_stats(logits, rows, targets, leaves=leaves).leaf_kl.sum().backward()
    assert leaves.teacher.hidden.grad is None and leaves.teacher.weight.grad is None


def test_published_anchor():
    # s = [0,1,2,0], t = [0,1,2,-inf]: KL .0862, gradient [-.007, -.020, -.055, .083]
    student = torch.tensor([[0.0, 1.0, 2.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 1.0, 2.0, -math.inf]])
    leaves = Leaves(torch.tensor([0]), TeacherRows(torch.eye(1), teacher.T))
    none = torch.zeros(0, dtype=torch.int64)
    kl = token_stats(student, none, none, leaves=leaves).leaf_kl
    kl.sum().backward()
    assert abs(float(kl.detach()) - 0.0862) < 1e-4
    rounded = [round(x, 3) + 0.0 for x in student.grad[0].tolist()]
    assert rounded == [-0.007, -0.020, -0.055, 0.083]


INF = math.inf


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        ([0, 0, -INF], [0, 0, -INF], 0.0),  # both exclude a token (padded vocabulary)
        ([0, 0, 1e4], [0, 0, 1e4], 0.0),  # huge logits
        ([0, 0, -INF], [0, 0, 0], math.nan),  # the student excludes what the teacher allows
        ([0, 0, 0], [-INF, -INF, -INF], math.nan),  # no distribution at all
        ([0, 0, 0], [0, math.nan, 0], math.nan),
        ([0, INF, 0], [0, 0, 0], math.nan),
    ],
)
def test_nasty_rows_are_zero_or_marked_invalid_and_never_poison_the_gradient(
    student, teacher, expected
):
    logits = torch.tensor([student, [1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([0, 1])
    table = torch.tensor([teacher, [3.0, 2.0, 1.0]], dtype=torch.float64)
    leaves = Leaves(rows, SimpleNamespace(logits=lambda part: table[part]))
    kl = token_stats(logits, rows[:0], rows[:0], leaves=leaves).leaf_kl
    value = float(kl[0].detach())
    assert math.isnan(value) if math.isnan(expected) else abs(value - expected) < 1e-12
    torch.where(kl.isnan(), 0.0, kl).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[1].any()


def test_empty_targets_and_leaves_keep_the_graph():
    logits, rows, targets, _ = example()
    found = token_stats(logits, rows[:0], targets[:0])
    assert found.leaf_kl.numel() == 0
    found.log_probs.sum().backward()
    assert not logits.grad.any()
