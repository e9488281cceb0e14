"""Token-level maths on logits: target log-probs, entropy and forward KL, in one autograd node.

One node means one gradient buffer of the logits' size. Rows are visited in chunks, in forward
and backward, so no second tensor of that size is ever alive; the teacher's logits exist for one
chunk at a time. Shapes: T packed rows, N targets, D leaves, V vocabulary, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 32 * 2**20
"""Target size of one chunk of float logits."""


class TokenStats(NamedTuple):
    """What the loss needs of every target and every leaf."""

    log_probs: Tensor
    """`[N]`."""
    entropy: Tensor
    """`[N]`, of the row that predicts the target."""
    leaf_kl: Tensor
    """`[D]`, forward KL from the teacher; NaN, and no gradient, where it is not finite."""


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """The teacher at D leaves, as hidden states, so that no `[D, V]` tensor is kept."""

    hidden: Tensor
    """`[D, h]`, after the final norm, no gradient."""
    weight: Tensor
    """`[V, h]`, the output projection."""
    bias: Tensor | None = None

    def logits(self, rows: slice) -> Tensor:
        """`[len(rows), V]`."""
        return torch.nn.functional.linear(self.hidden[rows], self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Diverging leaves: student rows of the logits and the teacher for each of them."""

    rows: Tensor
    """int64 `[D]`, rows of the packed logits."""
    teacher: TeacherRows


def _chunks(count: int, vocab: int, dtype: torch.dtype) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (vocab * dtype.itemsize))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """At least float32, divided by the sampling temperature."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits / temperature


def forward_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher || student) over the full vocabulary, never negative.

    Uses Σp = Σq = 1: the sum of `p (expm1(-d) + d)` has terms that are all non-negative, with
    an error near 1e-12 where `Σ p (log p - log q)` has 1e-6; beyond |d| = 1, and where p = 0, it
    switches to `p d - p + q`, which cannot overflow and keeps q's mass. d = log p - log q.

    Args:
        student_logits, teacher_logits: `[..., V]`.

    Returns:
        `[...]`; inf where the student excludes what the teacher allows, NaN for a row without
        a distribution.
    """
    log_q = torch.log_softmax(student_logits, -1)
    log_p = torch.log_softmax(teacher_logits, -1)
    p, q = log_p.exp(), log_q.exp()
    excluded = (p == 0) & ~log_p.isnan()
    d = torch.where(excluded, 0.0, log_p - log_q)
    near = (d.abs() < 1) & ~excluded
    far = torch.where(excluded, q, p * d - p + q)
    return torch.where(near, p * (torch.expm1(-d) + d), far).sum(-1)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        leaves: Leaves | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_probs = torch.empty(rows.numel(), dtype=dtype, device=logits.device)
        entropy = torch.empty_like(log_probs)
        for part in _chunks(rows.numel(), logits.shape[-1], dtype):
            log_q = torch.log_softmax(_scaled(logits[rows[part]], temperature), -1)
            log_probs[part] = log_q.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
            entropy[part] = -torch.where(log_q > -torch.inf, log_q.exp() * log_q, 0.0).sum(-1)
        count = 0 if leaves is None else leaves.rows.numel()
        leaf_kl = torch.empty(count, dtype=dtype, device=logits.device)
        if leaves is not None:
            for part in _chunks(count, logits.shape[-1], dtype):
                student = _scaled(logits[leaves.rows[part]], temperature)
                leaf_kl[part] = forward_kl(
                    student, _scaled(leaves.teacher.logits(part), temperature)
                )
        valid = leaf_kl.isfinite()
        ctx.save_for_backward(logits, rows, targets, valid)
        ctx.leaves, ctx.temperature = leaves, temperature
        return log_probs, entropy, torch.where(valid, leaf_kl, torch.nan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, rows, targets, valid = ctx.saved_tensors
        grad_log_probs, grad_entropy, grad_kl = grads
        grad = torch.zeros_like(logits)
        with_entropy = bool(grad_entropy.any())
        for part in _chunks(rows.numel(), logits.shape[-1], grad_log_probs.dtype):
            log_q = torch.log_softmax(_scaled(logits[rows[part]], ctx.temperature), -1)
            step = log_q.exp() * -grad_log_probs[part].unsqueeze(-1)
            step.scatter_add_(-1, targets[part].unsqueeze(-1), grad_log_probs[part].unsqueeze(-1))
            if with_entropy:
                step += _entropy_grad(log_q) * grad_entropy[part].unsqueeze(-1)
            _add_rows(grad, rows[part], step, ctx.temperature)
        if ctx.leaves is not None:
            _add_kl_grad(grad, logits, ctx.leaves, grad_kl, valid, ctx.temperature)
        return grad, None, None, None, None


def _entropy_grad(log_q: Tensor) -> Tensor:
    """dH/dz = -q (log q + H)."""
    plogp = torch.where(log_q > -torch.inf, log_q.exp() * log_q, 0.0)
    return -(plogp - log_q.exp() * plogp.sum(-1, keepdim=True))


def _add_kl_grad(
    grad: Tensor,
    logits: Tensor,
    leaves: Leaves,
    grad_kl: Tensor,
    valid: Tensor,
    temperature: float,
) -> None:
    """dKL/dz = q - p at every valid leaf."""
    for part in _chunks(leaves.rows.numel(), logits.shape[-1], grad_kl.dtype):
        q = torch.softmax(_scaled(logits[leaves.rows[part]], temperature), -1)
        p = torch.softmax(_scaled(leaves.teacher.logits(part), temperature), -1)
        step = torch.where(valid[part].unsqueeze(-1), (q - p) * grad_kl[part].unsqueeze(-1), 0.0)
        _add_rows(grad, leaves.rows[part], step, temperature)


def _add_rows(grad: Tensor, rows: Tensor, step: Tensor, temperature: float) -> None:
    step = step if temperature == 1.0 else step / temperature
    grad.index_add_(0, rows, step.to(grad.dtype))


def token_stats(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    leaves: Leaves | None = None,
    temperature: float = 1.0,
) -> TokenStats:
    """Log-prob and entropy of every target, forward KL of every leaf (002, Eq. 10).

    Args:
        logits: `[T, V]`; computed in float32, or float64 if given so.
        rows: int64 `[N]`, the row that predicts each target.
        targets: int64 `[N]`, token ids.
        leaves: diverging leaves, or None. No gradient reaches the teacher.
        temperature: of sampling; divides student and teacher logits alike.
    """
    stats = _TokenStats.apply(logits, rows, targets, leaves, temperature)  # type: ignore[no-untyped-call]
    return TokenStats(*stats)
