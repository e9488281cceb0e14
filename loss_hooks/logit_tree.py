"""`logit_tree` (002, §4.1): the K+1 branches as K+1 rows of one rollout. Exact."""

from __future__ import annotations

import numpy as np

from harness_bridges.branches import branches
from harness_bridges.record import Episode
from loss_hooks.method import Method, register_method
from loss_hooks.naive import policy_loss
from loss_hooks.rows import Row, make_row


def rows(episode: Episode) -> list[Row]:
    """One row per branch that sampled anything; every sampled token is a target exactly once."""
    found = []
    for branch in branches(episode.turns):
        turns = episode.turns[branch.first : branch.last + 1]
        index = [np.arange(t.prompt_ids.size, t.prompt_ids.size + t.output_ids.size) for t in turns]
        targets = np.concatenate(index)
        if targets.size:
            log_probs = np.concatenate([turn.output_logprobs for turn in turns])
            found.append(make_row(turns[-1].sequence, targets, log_probs))
    return found


LOGIT_TREE = register_method(Method(name="logit_tree", rows=rows, loss=policy_loss))
