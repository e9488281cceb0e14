"""`packed_mask` (002, §4.2, as prefix tree packing): one packed trie per episode. Exact.

The trie holds each (prefix, token) pair once; tokens after a divergence are copied, because an
engine that re-prefills an edited prompt gives them new hidden states. The record lists the
targets, since the row that predicts a token is its tree parent and not the row before it, and
since two turns may have sampled the same token on the same path.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness_bridges.record import Episode
from loss_hooks.host import Batch, HookResult, current_host, need_record
from loss_hooks.method import Method, register_method
from loss_hooks.policy_loss import Reduce
from loss_hooks.prefix_tree import pack_episodes
from loss_hooks.rows import Row, make_row, rollout_log_probs

NAME = "packed_mask"


def rows(episode: Episode) -> list[Row]:
    """One row: the packed trie, with its structure and targets in the record."""
    tree, targets = pack_episodes([episode])
    old = rollout_log_probs(episode, targets)
    record = {
        "method": NAME,
        "tree": {
            "positions": tree.positions.tolist(),
            "parents": tree.parents.tolist(),
            "nodes": tree.nodes.tolist(),
        },
        "targets": targets.index.tolist(),
        "rollout_log_probs": old.tolist(),
    }
    return [make_row(tree.tokens, targets.index, old, record)]


def loss(args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reduce) -> HookResult:
    """slime's custom loss hook: the policy loss on the targets of the packed tries."""
    records = [need_record(tokens, NAME) for tokens in batch["unconcat_tokens"]]
    host = current_host()
    return host.packed_policy_loss(args, batch, logits, sum_of_sample_mean, records)


PACKED_MASK = register_method(Method(name=NAME, rows=rows, loss=loss))
