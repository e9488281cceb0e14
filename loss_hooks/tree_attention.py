"""Tree attention on a packed trie: dense softmax over ancestors, with no mask at all.

In depth-first order a node's descendants are one contiguous range, so attention is, per node,
one causal square (the node on itself) and one unmasked rectangle (its descendants on it). The
partial outputs merge by log-sum-exp; the backward of each part is the flash backward with the
merged output and log-sum-exp. Work is proportional to the attended pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness_bridges.errors import CampError
from harness_bridges.record import IntArray

IMPLEMENTATION = "camp_tree"
"""Name under which the attention function is registered with transformers."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Where the nodes of a packed forest lie: `(start, stop, subtree stop)` in order.

    Separate rows are a forest of single nodes, so one layout serves every method.
    """

    nodes: tuple[tuple[int, int, int], ...]
    length: int
    """T, number of packed tokens."""
    depth: int
    """Longest path, the number of keys that one query can attend to."""

    def parts(self) -> Iterator[tuple[slice, slice, bool]]:
        """`(queries, keys, causal)` of every piece of work, ancestors before descendants."""
        for start, stop, subtree in self.nodes:
            yield slice(start, stop), slice(start, stop), True
            if subtree > stop:
                yield slice(stop, subtree), slice(start, stop), False


def make_layout(nodes: IntArray, positions: IntArray) -> TreeLayout:
    """A layout from a prefix tree's nodes `[N, 3]` and positions `[T]`."""
    triples = tuple((int(a), int(b), int(c)) for a, b, c in nodes)
    return TreeLayout(triples, positions.size, int(positions.max(initial=-1)) + 1)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
    ) -> Tensor:
        _, heads, length, _ = query.shape
        out = torch.zeros_like(query)
        # Memory order [B, T, H]: the layout in which the backward kernel reads it.
        lse = query.new_full((1, length, heads), -torch.inf).transpose(1, 2)
        for rows, keys, causal in layout.parts():
            part, part_lse = _flash(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, causal, scale=scale
            )
            _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (query, key, value))
        for rows, keys, causal in ctx.layout.parts():
            dq, dk, dv = _flash_backward(
                grad_out[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                causal,
                scale=ctx.scale,
            )
            grad_q[:, :, rows] += dq
            grad_k[:, :, keys] += dk
            grad_v[:, :, keys] += dv
        return grad_q, grad_k, grad_v, None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial attention to the running one, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp().unsqueeze(-1))
    out.add_(part * (part_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """Softmax attention of every packed token over its ancestors and itself.

    Args:
        query: `[1, H, T, D]` float32 or float64, RoPE applied by tree position.
        key, value: `[1, H_kv, T, D]`; H is a multiple of H_kv (grouped queries).
        layout: where the nodes lie.
        scale: factor on the scores.

    Returns:
        `[1, H, T, D]`.

    Raises:
        CampError: another device than the CPU, a batch, or a layout of another length.
    """
    if query.device.type != "cpu":
        raise CampError(
            f"tree attention on {query.device.type}: this version has a CPU kernel only; move "
            "the model to the CPU"
        )
    if query.shape[0] != 1 or query.shape[2] != layout.length:
        raise CampError(
            f"query of shape {tuple(query.shape)}: expected one packed sequence of "
            f"{layout.length} tokens"
        )
    out: Tensor = _TreeAttention.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return out


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    camp_layout: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers attention interface; registered as `camp_tree`.

    Raises:
        CampError: the model does not pass the layout on, or its attention is not plain dense
            softmax (dropout, a window shorter than the longest path, soft-capping, sinks).
    """
    if camp_layout is None:
        raise CampError(
            f"{type(module).__name__}: the tree layout did not reach the attention; this model "
            "does not pass keyword arguments on and cannot be trained by this host"
        )
    unsupported = {
        "attention_mask": attention_mask is not None,
        "dropout": dropout > 0,
        "sliding_window": sliding_window is not None and sliding_window < camp_layout.depth,
        "softcap": kwargs.get("softcap") is not None,
        "s_aux": kwargs.get("s_aux") is not None,
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, hit in unsupported.items() if hit)
        raise CampError(
            f"{type(module).__name__}: tree attention is dense softmax only, but the model asks "
            f"for {names}"
        )
    out = tree_attention(query, key, value, camp_layout, scaling)
    return out.transpose(1, 2).contiguous(), None
