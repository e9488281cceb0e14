"""Episodes for tests, from plain lists of token ids."""

import random

import numpy as np

from harness_bridges.record import Episode, Turn


def turn(prompt, output, log_probs=None, **kwargs):
    log_probs = [-0.5] * len(output) if log_probs is None else log_probs
    fields = {"finish_reason": "stop", "weight_version": "0", **kwargs}
    return Turn(prompt_ids=prompt, output_ids=output, output_logprobs=log_probs, **fields)


def episode(turns, **kwargs):
    """`turns` are Turn objects or (prompt, output) pairs."""
    turns = tuple(t if isinstance(t, Turn) else turn(*t) for t in turns)
    fields = {"rollout_id": 0, "group_id": 0, "session_id": "s", "task_id": "t", "reward": 0.0}
    return Episode(turns=turns, **{**fields, **kwargs})


def tokens(rng, count, vocab):
    return [rng.randrange(vocab) for _ in range(count)]


def edited_episode(seed, vocab, *, trunk=60, steps=6, **kwargs):
    """An agent run with an interior eviction, a fold that keeps a tail, a retry and plain turns.

    `trunk` sets where the first fork lies; with 57 to 63 nodes start at every such offset.
    """
    rng = random.Random(seed)
    view = tokens(rng, trunk, vocab)
    turns = []
    for step in range(steps):
        out = tokens(rng, rng.randint(2, 6), vocab)
        turns.append((list(view), out))
        if step == 1:  # the same prompt again: equal tokens first, then a sibling
            turns.append((list(view), [out[0], (out[1] + 1) % vocab]))
            turns.append((list(view), out[:1]))  # a branch that is a prefix of another
        view = view + out + tokens(rng, rng.randint(3, 9), vocab)
        if step == 2:  # an interior span leaves, survivors stay after it
            del view[trunk : trunk + 5]
        if step == 3:  # a fold: a summary takes the place of older text, the tail stays
            summary = tokens(rng, 3, vocab)
            turns.append((view + tokens(rng, 2, vocab), summary))
            view = view[: trunk // 2] + summary + view[-24:]
    return episode(turns, **kwargs)


def with_log_probs(episode_, log_probs):
    """The same episode with other recorded log-probs, one array per turn."""
    turns = [
        turn(t.prompt_ids, t.output_ids, np.asarray(lp), finish_reason=t.finish_reason)
        for t, lp in zip(episode_.turns, log_probs, strict=True)
    ]
    return episode(
        turns,
        rollout_id=episode_.rollout_id,
        group_id=episode_.group_id,
        reward=episode_.reward,
        edits=episode_.edits,
    )
