"""Packed forwards: rows and tries as one forest through a transformers decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from harness_bridges.errors import CampError
from harness_bridges.record import IntArray
from loss_hooks.host import find_record
from loss_hooks.prefix_tree import build_tree
from loss_hooks.tree_attention import IMPLEMENTATION, TreeLayout, attention_forward, make_layout

AttentionInterface.register(IMPLEMENTATION, attention_forward)
# The layout replaces the mask; transformers must not build one.
AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)


@contextmanager
def tree_attention_enabled(model: Any) -> Iterator[None]:
    """Run the model's attention on packed trees until the block ends."""
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def hidden_states(model: Any, tokens: Tensor, positions: Tensor, layout: TreeLayout) -> Tensor:
    """Final hidden states of a packed forest.

    Args:
        model: a transformers causal decoder.
        tokens, positions: int64 `[T]`.
        layout: where the nodes lie.

    Returns:
        `[T, h]`, after the final norm.

    Raises:
        CampError: a path longer than the model's context.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and layout.depth > limit:
        raise CampError(
            f"a path of {layout.depth} tokens exceeds max_position_embeddings={limit}; lower "
            "rollout_max_context_len"
        )
    vocab = model.get_input_embeddings().num_embeddings
    if tokens.numel() and int(tokens.max()) >= vocab:
        raise CampError(
            f"token id {int(tokens.max())} is not in the model's vocabulary of {vocab}; these "
            "episodes were sampled by another model"
        )
    with tree_attention_enabled(model):
        out = model.get_decoder()(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            camp_layout=layout,
        )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


@torch.no_grad()
def check_tree_attention(model: Any) -> None:
    """Compare a small trie with its two paths run alone.

    Raises:
        CampError: they differ: the model's attention does not follow the layout.
    """
    tree, paths = build_tree([np.array([1, 2, 3]), np.array([1, 4, 5])])
    tokens, positions = torch.from_numpy(tree.tokens), torch.from_numpy(tree.positions)
    packed = hidden_states(model, tokens, positions, make_layout(tree.nodes, tree.positions))
    for path in paths:
        alone = model.get_decoder()(input_ids=tokens[path][None], use_cache=False)
        expected = alone.last_hidden_state[0]
        error = float((packed[path] - expected).abs().max() / expected.abs().max())
        if not error < 1e-3:
            raise CampError(
                f"{model.config.model_type}: tree attention differs from a plain forward by "
                f"{error:.1e}; this model's layers are not plain dense attention"
            )


def _packed_tree(tokens: Tensor) -> Mapping[str, Any] | None:
    """The trie that a row is, by its record; None for a plain sequence."""
    record = find_record(tokens)
    tree: Mapping[str, Any] | None = None if record is None else record.get("tree")
    return tree


def predictors(tokens: Tensor) -> Tensor:
    """int64 `[L]`: for each token of a row, the row of logits that predicts it, -1 for none."""
    tree = _packed_tree(tokens)
    if tree is not None:
        return torch.tensor(tree["parents"], dtype=torch.int64)
    return torch.arange(-1, tokens.numel() - 1)


def row_structure(tokens: Tensor) -> tuple[IntArray, IntArray]:
    """A row's positions `[L]` and nodes `[N, 3]`: its record's trie, or one chain."""
    tree = _packed_tree(tokens)
    if tree is not None:
        positions = np.asarray(tree["positions"], dtype=np.int64)
        return positions, np.asarray(tree["nodes"], dtype=np.int64)
    size = tokens.numel()
    return np.arange(size), np.array([[0, size, size]], dtype=np.int64)


def pack_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, TreeLayout]:
    """One forest of all rows: tokens `[T]`, positions `[T]` and the layout."""
    positions, nodes, start = [], [], 0
    for row in rows:
        row_positions, row_nodes = row_structure(row)
        positions.append(row_positions)
        nodes.append(row_nodes + start)
        start += row.numel()
    flat = np.concatenate(positions)
    return torch.cat(list(rows)), torch.from_numpy(flat), make_layout(np.concatenate(nodes), flat)
