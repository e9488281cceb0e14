"""The offline probe (002, §6.3): log-probs of recorded tokens under each method's conditioning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from camp_plugin.local.host import LocalHost
from harness_bridges.branches import branches, episode_tape, retokenised
from harness_bridges.errors import CampError
from harness_bridges.record import Episode, FloatArray, IntArray
from loss_hooks.host import stash_records
from loss_hooks.method import Method, find_method
from loss_hooks.rows import Row, walk_targets

METHODS = ("naive_compressed", "naive_full", "logit_tree", "packed_mask", "sdcc")


@dataclass(slots=True)
class ProbeResult:
    """Per-token differences in nats over all probed episodes."""

    logdiff: dict[str, list[FloatArray]] = field(default_factory=dict)
    """Per method: |train - rollout log-prob| of its loss tokens (Eq. 1)."""
    delta_comp: list[FloatArray] = field(default_factory=list)
    """`Deltas.comp`; predicted < 0."""
    delta_full: list[FloatArray] = field(default_factory=list)
    """`Deltas.full`; predicted > 0."""
    junctions: int = 0
    too_long: int = 0
    """Episodes whose tape is longer than the model's context: `naive_full` cannot forward it."""
    retokenised: int = 0
    """Junctions that are no edit: sampled text came back as other tokens."""

    def summary(self) -> dict[str, Any]:
        """JSON values; NaN (nothing to measure) becomes None."""
        methods = {}
        for name, parts in self.logdiff.items():
            values = np.concatenate([np.empty(0), *parts])
            methods[name] = {
                "camp/logdiff_mean": _finite(values.mean()) if values.size else None,
                "camp/logdiff_max": _finite(values.max()) if values.size else None,
                "loss_tokens": int(values.size),
            }
        return {
            "methods": methods,
            "camp/delta_comp": _delta(self.delta_comp),
            "camp/delta_full": _delta(self.delta_full),
            "too_long_for_naive_full": self.too_long,
            "junctions": self.junctions,
            "retokenised": self.retokenised,
        }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _delta(parts: list[FloatArray]) -> dict[str, float | int | None]:
    values = np.concatenate([np.empty(0), *parts])
    if not values.size:
        return {"n": 0, "mean": None, "below_zero": None, "above_zero": None}
    return {
        "n": int(values.size),
        "mean": _finite(values.mean()),
        "below_zero": float((values < 0).mean()),
        "above_zero": float((values > 0).mean()),
    }


def probe(
    episodes: Iterable[Episode],
    host: LocalHost,
    decode: Callable[[Sequence[int]], str],
    *,
    temperature: float | None = None,
    progress: Callable[[], None] = lambda: None,
) -> ProbeResult:
    """Score every episode under all five conditionings with the same weights.

    Args:
        episodes: recorded episodes.
        host: the model; for a logdiff near zero, the one that sampled them.
        decode: its tokenizer, token ids to text.
        temperature: of sampling; None takes the one that each episode recorded.
        progress: called once per episode.

    Raises:
        CampError: there is no episode, or one has no recorded temperature and none was given.
    """
    result = ProbeResult({name: [] for name in METHODS})
    seen = 0
    for episode in episodes:
        at = sampling_temperature(episode, temperature)
        if episode.num_sampled == 0:
            raise CampError(f"episode {episode.rollout_id}: has no sampled token to probe")
        _probe_episode(episode, host, at, result)
        result.junctions += len(branches(episode.turns)) - 1
        result.retokenised += retokenised(episode.turns, decode)
        seen += 1
        progress()
    if not seen:
        raise CampError("there is no episode to probe")
    return result


def sampling_temperature(episode: Episode, given: float | None) -> float:
    """The temperature that was given, or that the episode recorded; a missing one is an error."""
    found = episode.metadata.get("temperature") if given is None else given
    if not isinstance(found, int | float) or not found > 0:
        raise CampError(
            f"episode {episode.rollout_id}: temperature={found!r}; give --temperature, above 0"
        )
    return float(found)


def _probe_episode(
    episode: Episode, host: LocalHost, temperature: float, result: ProbeResult
) -> None:
    whole = tape_fits(episode, host)
    result.too_long += not whole
    scored = {
        name: target_log_probs(episode, find_method(name), host, temperature)
        for name in METHODS
        # sdcc's loss forwards the walk, as naive_compressed does.
        if name != "sdcc" and (whole or name != "naive_full")
    }
    scored["sdcc"] = scored["naive_compressed"]
    for name, (log_probs, rollout) in scored.items():
        result.logdiff[name].append(np.abs(log_probs - rollout))
    walk, live = (scored[name][0] for name in ("naive_compressed", "logit_tree"))
    found = deltas(episode, walk, live, scored["naive_full"][0] if whole else None)
    result.delta_comp.append(found.comp)
    result.delta_full.append(found.full)


@dataclass(frozen=True, slots=True, eq=False)
class Deltas:
    """The two pitfalls of one episode (002, 6.3), in nats per token.

    Tokens are named by their number among all sampled tokens, turn by turn.
    """

    comp: FloatArray
    """float64 `[C]`: log p(walk prefix) - log p(live prefix), at diverging leaves."""
    comp_token: IntArray
    full: FloatArray
    """float64 `[F]`: log p(tape prefix) - log p(walk prefix), at survivors sampled after the
    first edit."""
    full_token: IntArray


def tape_fits(episode: Episode, host: LocalHost) -> bool:
    """Whether the model's context holds the whole tape, as `naive_full` needs."""
    longest = getattr(host.model.config, "max_position_embeddings", None)
    return longest is None or episode_tape(episode).tokens.size <= longest


def deltas(episode: Episode, walk: FloatArray, live: FloatArray, full: FloatArray | None) -> Deltas:
    """Compare log-probs under the three conditionings.

    Args:
        episode: whose tokens they are.
        walk: float64 `[S]`, of the walk's targets (`naive_compressed`).
        live: float64 `[N]`, of all sampled tokens, turn by turn (`logit_tree`, `packed_mask`).
        full: float64 `[N]`, likewise (`naive_full`); None where the tape does not fit.
    """
    starts = np.cumsum([0, *(turn.output_ids.size for turn in episode.turns)])
    left = walk_targets(episode)
    token = starts[left.turn] + left.offset
    edits = episode_tape(episode).edits
    after = left.turn >= min((edit.turn for edit in edits), default=len(episode.turns))
    if full is None:
        full, after = live, np.zeros_like(after)
    return Deltas(
        comp=(walk - live[token])[left.diverges],
        comp_token=token[left.diverges],
        full=(full[token] - walk)[after],
        full_token=token[after],
    )


@torch.no_grad()
def target_log_probs(
    episode: Episode, method: Method, host: LocalHost, temperature: float
) -> tuple[FloatArray, FloatArray]:
    """Log-probs now and at rollout of the method's targets, both `[M]`, in target order."""
    args = SimpleNamespace(rollout_temperature=temperature)
    now, then = [], []
    for row in method.rows(episode):
        log_probs = _row_log_probs(row, host, args)
        record = row.record or {}
        if "targets" in record:
            slots = np.array(record["targets"], dtype=np.int64) - row.prompt_length
            then.append(np.array(record["rollout_log_probs"]))
        else:
            slots = np.flatnonzero(row.loss_mask)
            then.append(row.rollout_log_probs[slots])
        now.append(log_probs[slots])
    return np.concatenate(now), np.concatenate(then)


def _row_log_probs(row: Row, host: LocalHost, args: SimpleNamespace) -> FloatArray:
    tokens = torch.from_numpy(np.array(row.tokens))
    stash_records([tokens], [row.record], [0])
    batch = {"unconcat_tokens": [tokens], "response_lengths": [row.loss_mask.size]}
    (log_probs,) = host.log_probs(args, batch, host.logits(batch))
    return log_probs.double().numpy()
