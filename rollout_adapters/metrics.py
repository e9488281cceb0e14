"""Metrics of episodes; names are fixed (`camp/...`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness_bridges.branches import branches, episode_tape, evicted_fraction
from harness_bridges.record import Episode
from loss_hooks.prefix_tree import build_tree


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What editing did to a batch of episodes.

    `camp/segments` is the mean number of branches; `camp/pack_ratio` trie tokens over branch
    tokens; `camp/edit_freq` Pr[c > 0] and `camp/edit_depth` E[c | c > 0] (002, metric 5; NaN,
    not 0, if nothing was evicted), where c is the share of an episode's tape that was evicted;
    `camp/evict_sessions` and `camp/evict_ratio` count the episodes with c > 0 and average c over
    all `camp/sessions` (Table 10). `camp/max_context` is the longest prompt and response,
    `camp/template_junctions` the share of edits that a chat template caused.
    """
    legs = [branches(episode.turns) for episode in episodes]
    sequences = [
        [episode.turns[leg.last].sequence for leg in found]
        for episode, found in zip(episodes, legs, strict=True)
    ]
    packed = sum(build_tree(paths)[0].tokens.size for paths in sequences)
    tapes = [episode_tape(episode) for episode in episodes]
    evicted = np.array([evicted_fraction(tape) for tape in tapes])
    causes = [edit.cause for tape in tapes for edit in tape.edits]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return {
        "reward": float(np.mean(rewards)) if rewards else math.nan,
        "camp/segments": float(np.mean([len(found) for found in legs])),
        "camp/pack_ratio": packed / sum(path.size for paths in sequences for path in paths),
        "camp/edit_freq": float((evicted > 0).mean()),
        "camp/edit_depth": float(evicted[evicted > 0].mean()) if evicted.any() else math.nan,
        "camp/sessions": float(len(episodes)),
        "camp/evict_sessions": float((evicted > 0).sum()),
        "camp/evict_ratio": float(evicted.mean()),
        "camp/max_context": float(max(path.size for paths in sequences for path in paths)),
        "camp/template_junctions": (
            causes.count("chat_template") / len(causes) if causes else math.nan
        ),
    }
