"""The packed trie against a set of prefixes, and tree attention against a dense mask."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes import episode

from harness_bridges.errors import CampError
from loss_hooks.prefix_tree import build_tree, pack_episodes
from loss_hooks.tree_attention import attention_forward, make_layout, tree_attention

paths_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8
)


def check(paths):
    """Every property of a packed trie, from the paths alone."""
    tree, located = build_tree([np.array(p) for p in paths])
    prefixes = {tuple(p[: i + 1]) for p in paths for i in range(len(p))}
    assert tree.tokens.size == len(prefixes)
    spelled = {}
    for path, rows in zip(paths, located, strict=True):
        assert tree.tokens[rows].tolist() == path
        assert tree.positions[rows].tolist() == list(range(len(path)))
        assert tree.parents[rows].tolist() == [-1, *rows[:-1].tolist()]
        for i, row in enumerate(rows.tolist()):
            assert spelled.setdefault(row, tuple(path[: i + 1])) == tuple(path[: i + 1])
    assert set(spelled.values()) == prefixes
    covered = np.concatenate([np.arange(a, b) for a, b, _ in tree.nodes])
    assert covered.tolist() == list(range(tree.tokens.size))
    for start, stop, subtree in tree.nodes.tolist():
        below = [
            r for r, prefix in spelled.items() if prefix[: len(spelled[start])] == spelled[start]
        ]
        assert sorted(below) == list(range(start, subtree)) and start < stop <= subtree
    assert tree.pairs == sum(len(prefix) for prefix in prefixes)


@settings(max_examples=300, deadline=None)
@given(paths_strategy)
def test_trie_of_random_paths(paths):
    check(paths)


def test_docstring_example():
    tree, _ = build_tree([np.array(p) for p in ([1, 2, 3], [1, 2, 4, 5], [1, 2])])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5]
    assert tree.positions.tolist() == [0, 1, 2, 2, 3]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 3]
    assert tree.nodes.tolist() == [[0, 2, 5], [2, 3, 3], [3, 5, 5]]


def test_case_10_the_head_of_a_branch_is_predicted_by_its_parent():
    # flat [p0, p1, a0, a1, b0, b1]: the predictor of b0 is p1 (1), not a1 (3)
    tree, _ = build_tree([np.array([1, 2, 3, 4]), np.array([1, 2, 5, 6])])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1, 4]


def test_case_09_positions_are_depths():
    live = [[10, 11, 1, 2, 3, 12], [10, 11, 12, 12]]
    tree, located = build_tree([np.array(p) for p in live])
    assert tree.positions[located[1]].tolist() == [0, 1, 2, 3]


def dense(query, key, value, parents, scale):
    """Attention with an explicit ancestor mask, one query at a time."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    allowed = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i in range(len(parents)):
        at = i
        while at >= 0:
            allowed[i, at] = True
            at = int(parents[at])
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    return torch.softmax(scores, -1) @ value


@settings(max_examples=60, deadline=None)
@given(paths_strategy, st.integers(0, 10**6))
def test_tree_attention_equals_a_dense_mask_with_gradients(paths, seed):
    tree, _ = build_tree([np.array(p) for p in paths])
    g = torch.Generator().manual_seed(seed)
    size = tree.tokens.size
    q, k, v, grad = (
        torch.randn(1, heads, size, 8, generator=g, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2, 4)
    )
    out = tree_attention(q, k, v, make_layout(tree.nodes, tree.positions), 0.3)
    expected = dense(q, k, v, tree.parents, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad.detach()),
        torch.autograd.grad(expected, (q, k, v), grad.detach()),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def layout_of(paths):
    tree, _ = build_tree([np.array(p) for p in paths])
    return make_layout(tree.nodes, tree.positions)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"camp_layout": None}, "layout did not reach"),
        ({"dropout": 0.1}, "dropout"),
        ({"sliding_window": 2}, "sliding_window"),
        ({"softcap": 30.0}, "softcap"),
        ({"attention_mask": torch.zeros(1)}, "attention_mask"),
    ],
)
def test_attention_that_is_not_dense_softmax_is_refused_by_name(option, named):
    x = torch.zeros(1, 1, 3, 8)
    options = {"camp_layout": layout_of([[1, 2, 3]]), "attention_mask": None, **option}
    mask = options.pop("attention_mask")
    with pytest.raises(CampError, match=named):
        attention_forward(torch.nn.Linear(1, 1), x, x, x, mask, 1.0, **options)


def test_another_length_or_device_is_refused():
    x = torch.zeros(1, 1, 3, 8)
    with pytest.raises(CampError, match="4 tokens"):
        tree_attention(x, x, x, layout_of([[1, 2, 3, 4]]), 1.0)
    meta = torch.zeros(1, 1, 3, 8, device="meta")
    with pytest.raises(CampError, match="meta"):
        tree_attention(meta, meta, meta, layout_of([[1, 2, 3]]), 1.0)


def test_rollouts_of_one_prompt_share_it_and_keep_their_own_targets():
    first = episode([([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7])])
    second = episode([([1, 2, 3], [4, 8]), ([1, 2, 9], [4])])
    tree, targets = pack_episodes([first, second])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 4]
    assert targets.token.tolist() == [4, 5, 7, 4, 8, 4]
    assert targets.row.tolist() == [2, 3, 5, 2, 3, 8], "4 after 3 is two targets on one row"
    assert targets.episode.tolist() == [0, 0, 0, 1, 1, 1]
    assert targets.turn.tolist() == [0, 0, 1, 0, 0, 1]
    assert targets.offset.tolist() == [0, 1, 0, 0, 1, 0]
