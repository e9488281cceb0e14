"""The prefix tree: the trie of all token paths, each (prefix, token) pair once.

Packed in depth-first order, so that every subtree is one contiguous range: tree attention needs
no mask, only intervals. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harness_bridges.align import common_prefix
from harness_bridges.branches import branches
from harness_bridges.record import Episode, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """A packed trie.

    Example: paths `1 2 3`, `1 2 4 5` and `1 2` pack into five tokens::

        index      0  1  2  3  4
        tokens     1  2  3  4  5
        positions  0  1  2  2  3
        parents   -1  0  1  1  3
        nodes      [0, 2) with subtree [0, 5); [2, 3) with [2, 3); [3, 5) with [3, 5)
    """

    tokens: IntArray
    """int64 `[T]`."""
    positions: IntArray
    """int64 `[T]`: depth on the token's own path, the position that RoPE saw at rollout."""
    parents: IntArray
    """int64 `[T]`: packed index of the predecessor, -1 at a root. Logits of row `parents[i]`
    predict token i; the row before i is the wrong one at the head of a branch."""
    nodes: IntArray
    """int64 `[N, 3]`: start, stop and subtree stop of each chain without a fork, in order."""

    @property
    def pairs(self) -> int:
        """Attended (query, key) pairs: every token with its ancestors and itself."""
        return int((self.positions + 1).sum())


@dataclass(frozen=True, slots=True, eq=False)
class TreeTargets:
    """Every sampled token of the packed episodes; all arrays int64 `[M]`, in sampling order.

    Two calls that sampled the same token on the same path are two targets on one logit row.
    """

    row: IntArray
    """Packed index whose logits predict the target: its parent in the tree."""
    index: IntArray
    """Packed index of the target itself."""
    token: IntArray
    episode: IntArray
    """Index of the owner among the packed episodes."""
    turn: IntArray
    offset: IntArray
    """Index in the turn's output."""


@dataclass(slots=True)
class _Node:
    tokens: IntArray
    children: dict[int, _Node] = field(default_factory=dict)
    start: int = -1


def build_tree(paths: Sequence[IntArray]) -> tuple[PrefixTree, list[IntArray]]:
    """Pack token paths.

    Args:
        paths: int64 `[n_i]` each; equal prefixes are shared wherever they come from.

    Returns:
        The tree and, for each path, the int64 `[n_i]` packed indices of its tokens.
    """
    root = _Node(np.empty(0, dtype=np.int64))
    for path in paths:
        _insert(root, path)
    tree = _pack(root)
    return tree, [_locate(root, path) for path in paths]


def pack_episodes(episodes: Sequence[Episode]) -> tuple[PrefixTree, TreeTargets]:
    """The trie of all turns of one or many episodes, and who owns which target.

    Rollouts of one prompt share it, as the branches of one rollout share their trunk.
    """
    owners = [(number, leg) for number, e in enumerate(episodes) for leg in branches(e.turns)]
    tree, paths = build_tree([episodes[e].turns[leg.last].sequence for e, leg in owners])
    index, owner = [], []
    for (number, leg), path in zip(owners, paths, strict=True):
        for at in range(leg.first, leg.last + 1):
            turn = episodes[number].turns[at]
            start, size = turn.prompt_ids.size, turn.output_ids.size
            index.append(path[start : start + size])
            owner.append(np.stack([np.full(size, number), np.full(size, at), np.arange(size)]))
    found = np.concatenate([np.empty(0, dtype=np.int64), *index])
    who = np.concatenate([np.empty((3, 0), dtype=np.int64), *owner], axis=1)
    return tree, TreeTargets(tree.parents[found], found, tree.tokens[found], *who)


def _insert(root: _Node, path: IntArray) -> None:
    node, at = root, 0
    while at < path.size:
        child = node.children.get(int(path[at]))
        if child is None:
            node.children[int(path[at])] = _Node(path[at:])
            return
        shared = common_prefix(child.tokens, path[at:])
        at += shared
        if shared < child.tokens.size:
            if at == path.size:
                return  # the path ends inside the chain: nothing new
            rest = _Node(child.tokens[shared:], child.children)
            child.tokens, child.children = child.tokens[:shared], {int(rest.tokens[0]): rest}
        node = child
        if not node.children and at < path.size and node is not root:
            # A leaf that this path extends: the chain goes on without a fork.
            node.tokens = np.concatenate([node.tokens, path[at:]])
            return


def _pack(root: _Node) -> PrefixTree:
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    parents: list[IntArray] = []
    nodes: list[list[int]] = []
    total = 0
    stack: list[tuple[_Node, int, int, int]] = [
        (child, -1, 0, -1) for child in reversed(root.children.values())
    ]
    lineage: list[int] = []
    while stack:
        node, parent, depth, parent_node = stack.pop()
        _close(nodes, lineage, parent_node, total)
        node.start, size = total, node.tokens.size
        total += size
        tokens.append(node.tokens)
        positions.append(np.arange(depth, depth + size))
        parents.append(np.concatenate([[parent], np.arange(node.start, total - 1)]))
        lineage.append(len(nodes))
        nodes.append([node.start, total, total])
        stack += [
            (child, total - 1, depth + size, lineage[-1])
            for child in reversed(node.children.values())
        ]
    _close(nodes, lineage, -1, total)
    empty = np.empty(0, dtype=np.int64)
    return PrefixTree(
        tokens=np.concatenate([empty, *tokens]),
        positions=np.concatenate([empty, *positions]),
        parents=np.concatenate([empty, *parents]),
        nodes=np.array(nodes, dtype=np.int64).reshape(-1, 3),
    )


def _close(nodes: list[list[int]], lineage: list[int], until: int, total: int) -> None:
    """End the subtrees of all open nodes below `until`."""
    while lineage and lineage[-1] != until:
        nodes[lineage.pop()][2] = total


def _locate(root: _Node, path: IntArray) -> IntArray:
    parts: list[IntArray] = []
    node, at = root, 0
    while at < path.size:
        node = node.children[int(path[at])]
        size = min(node.tokens.size, path.size - at)
        parts.append(np.arange(node.start, node.start + size))
        at += size
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
