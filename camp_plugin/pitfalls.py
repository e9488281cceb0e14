"""The pitfall probe (002, 6.3 and F.2): scheduled episodes of every harness, both Δ of each.

A schedule makes every harness edit within five turns, whatever the model can do: each response is
a thought that the model samples, then an action that the schedule writes. Log-probs of both kinds
of token are the model's own.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from camp_plugin.local.config import UnusedSettingWarning, build_config
from camp_plugin.local.host import LocalHost
from camp_plugin.local.log import replace_file, start_bar
from camp_plugin.local.run import Rollouts, collect
from camp_plugin.probe import deltas, tape_fits, target_log_probs
from harness_bridges.branches import branches, episode_tape, survivors
from harness_bridges.engine import ChatTokenizer, Engine, Generation, Session
from harness_bridges.errors import ConfigError
from harness_bridges.record import Episode, FloatArray, IntArray
from harness_bridges.tape import Tape
from loss_hooks.method import find_method
from rollout_adapters.rollout import Policy
from rollout_adapters.sglang import SGLangClient

LEAD = "Thought:"
THOUGHT_TOKENS = 48
SETTINGS: dict[str, Any] = {
    "camp_method": "packed_mask",
    "camp_max_turns": 5,  # 002, Table 3: T_max = 5
    "rollout_temperature": 1.0,
    "rollout_max_response_len": 128,
    "seed": 7,
}
# So short that every harness edits between the first search and the answer; the contexts of the
# last three hold little more than a boundary needs with the packaged model's tokenizer.
SHORT: dict[str, dict[str, Any]] = {
    "agentfold": {
        "agentfold_threshold": 1,
        "agentfold_summary_tokens": THOUGHT_TOKENS,
        "agentfold_keep": 0,
    },
    "file_memory": {"boundary_write_tokens": 80, "rollout_max_context_len": 1180},
    "memory_tools": {"boundary_write_tokens": 80, "rollout_max_context_len": 1145},
    "compaction": {"boundary_write_tokens": 80, "rollout_max_context_len": 995},
}


class Scheduled:
    """An engine that thinks with the model and acts by the schedule.

    Where a harness's schedule leaves a call to the model, it is sampled as it is.
    """

    def __init__(
        self,
        engine: Engine,
        client: SGLangClient,
        chat: ChatTokenizer,
        demonstrate: Callable[[int, str], str | None],
        session: Any,
        scheduled: list[tuple[int, int, int]],
    ) -> None:
        self._engine, self._client, self._chat = engine, client, chat
        self._demonstrate, self._session, self._scheduled = demonstrate, session, scheduled
        self._calls = 0

    async def generate(
        self, prompt_ids: IntArray, *, max_new_tokens: int, temperature: float, stop: Sequence[str]
    ) -> Generation:
        turn, self._calls = self._calls, self._calls + 1
        action = self._demonstrate(turn, self._chat.decode(prompt_ids.tolist()))
        if action is None:
            return await self._engine.generate(
                prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature, stop=stop
            )
        lead = np.array(self._chat.encode(LEAD), dtype=np.int64)
        tail = self._chat.encode("\n" + (action or self._session.demonstrate()))
        room = min(THOUGHT_TOKENS, max_new_tokens - lead.size - len(tail))
        if room < 1:
            raise ConfigError(
                f"rollout_max_response_len, boundary_write_tokens: {max_new_tokens} tokens do not "
                f"hold the scheduled action of {lead.size + len(tail)}; raise them"
            )
        opened = np.concatenate([prompt_ids, lead])
        # An action of the model's own would come before the scheduled one.
        thought = await self._engine.generate(
            opened, max_new_tokens=room, temperature=temperature, stop=("<",)
        )
        kept = self._before_action(thought.output_ids)
        ids = np.concatenate([opened, thought.output_ids[:kept], np.array(tail, dtype=np.int64)])
        log_probs = await self._client.score(ids, prompt_ids.size)
        log_probs[lead.size : lead.size + kept] = thought.output_logprobs[:kept]
        size = ids.size - prompt_ids.size
        self._scheduled += [(turn, 0, lead.size), (turn, lead.size + kept, size)]
        return Generation(
            output_ids=ids[prompt_ids.size :],
            output_logprobs=log_probs,
            finish_reason="stop",
            weight_version=thought.weight_version,
        )

    def _before_action(self, ids: IntArray) -> int:
        """Tokens before the first that opens a tag or ends the turn."""
        for count, token in enumerate(ids.tolist()):
            if token in self._chat.eos_ids or "<" in self._chat.decode(ids[: count + 1].tolist()):
                return count
        return int(ids.size)


@dataclass(slots=True)
class HarnessPitfalls:
    """What the probe found with one harness; lists have an entry per episode."""

    junctions: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    """Diverging leaves (002, Definition 2)."""
    evicted: list[int] = field(default_factory=list)
    """An entry per junction: |E_k|, tokens that left the view there."""
    comp: list[FloatArray] = field(default_factory=list)
    full: list[FloatArray] = field(default_factory=list)
    comp_scheduled: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    """Which of the tokens the schedule wrote; likewise for `full`."""
    full_scheduled: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def add(self, episode: Episode, host: LocalHost) -> None:
        """Count the episode's tree and score it under the three conditionings."""
        tape = episode_tape(episode)
        starts = [leg.first for leg in branches(episode.turns)[1:]]
        self.junctions.append(len(starts))
        self.leaves.append(int(survivors(episode.turns, tape).diverges.sum()))
        self.evicted += [left_view(tape, turn) for turn in starts]
        if not tape.edits:
            return  # all three conditionings are one
        walk, _ = target_log_probs(episode, find_method("naive_compressed"), host, 1.0)
        full = None
        if tape_fits(episode, host):
            full, _ = target_log_probs(episode, find_method("naive_full"), host, 1.0)
        # The same weights recorded them: the live log-probs need no forward of their own.
        live = np.concatenate([turn.output_logprobs for turn in episode.turns])
        found = deltas(episode, walk, live, full)
        scheduled = scheduled_tokens(episode)
        self.comp.append(found.comp)
        self.full.append(found.full)
        self.comp_scheduled.append(scheduled[found.comp_token])
        self.full_scheduled.append(scheduled[found.full_token])

    def summary(self) -> dict[str, Any]:
        """JSON values; None where there was nothing to measure."""
        return {
            "rollouts": len(self.junctions),
            "junctions": float(np.mean(self.junctions)),
            "diverging_leaves": float(np.mean(self.leaves)),
            "evicted": float(np.mean(self.evicted)) if self.evicted else None,
            "delta_comp": _delta(self.comp, self.comp_scheduled, -1),
            "delta_full": _delta(self.full, self.full_scheduled, +1),
        }


def left_view(tape: Tape, turn: int) -> int:
    """|E_k|: tokens of the previous call's prompt and output that the turn's prompt lacks."""
    before = tape.positions(turn - 1, output=True)
    return int(np.setdiff1d(before, tape.positions(turn)).size)


def scheduled_tokens(episode: Episode) -> npt.NDArray[np.bool_]:
    """bool `[N]`: which sampled tokens, turn by turn, the schedule wrote."""
    starts = np.cumsum([0, *(turn.output_ids.size for turn in episode.turns)])
    found = np.zeros(starts[-1], dtype=np.bool_)
    for turn, start, stop in episode.metadata.get("scheduled", ()):
        found[starts[turn] + start : starts[turn] + stop] = True
    return found


def _delta(
    parts: Sequence[FloatArray], scheduled: Sequence[npt.NDArray[np.bool_]], predicted: int
) -> dict[str, Any]:
    values = np.concatenate([np.empty(0), *parts])
    written = np.concatenate([np.empty(0, dtype=np.bool_), *scheduled])
    whole = _signs(values)
    holds = None
    if values.size:
        right = float((np.sign(values) == predicted).mean())
        holds = whole["mean"] * predicted > 0 and right > 0.5
    return {
        **whole,
        "predicted_sign": "+" if predicted > 0 else "-",
        "holds": holds,
        "sampled": _signs(values[~written]),
        "scheduled": _signs(values[written]),
    }


def _signs(values: FloatArray) -> dict[str, Any]:
    """`n`, `mean` in nats, and the sign that most tokens have, with their share."""
    if not values.size:
        return {"n": 0, "mean": None, "majority_sign": None, "majority_share": None}
    above, below = float((values > 0).mean()), float((values < 0).mean())
    return {
        "n": int(values.size),
        "mean": float(values.mean()) if math.isfinite(values.mean()) else None,
        "majority_sign": "+" if above > below else "-",
        "majority_share": max(above, below),
    }


def probe_pitfalls(
    model: Any,
    harnesses: Sequence[str],
    rollouts: int,
    values: Mapping[str, Any],
    progress: Progress,
    save: Path | None = None,
) -> dict[str, Any]:
    """Run the schedule with every harness and measure both pitfalls.

    Args:
        model: the policy; `values["hf_checkpoint"]` names its directory.
        harnesses: names.
        rollouts: episodes of each.
        values: settings over the probe's own (`SETTINGS`, `SHORT`).
        progress: shows where it is.
        save: directory that keeps the episodes, one store per harness; those that are there
            already are not run again.

    Returns:
        Harness name to its `HarnessPitfalls.summary`.
    """
    if rollouts < 1:
        raise ConfigError(f"--rollouts {rollouts}: must be at least 1")
    args = {name: _args(name, values, rollouts) for name in harnesses}
    if unused := set(values) - {key for cell in args.values() for key in vars(cell)}:
        text = f"{', '.join(sorted(unused))}: no effect in this probe"
        warnings.warn(text, UnusedSettingWarning, stacklevel=2)
    host = LocalHost(model)
    if save:
        _claim(save, values)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in harnesses:
            store = (save or Path(scratch)) / f"episodes_{name}.jsonl.zst"
            episodes = _episodes(args[name], model, store, progress)
            result = HarnessPitfalls()
            bar = start_bar(progress, f"score {name}", rollouts)
            for episode in episodes:
                result.add(episode, host)
                progress.advance(bar)
            found[name] = result.summary()
    return found


def _claim(directory: Path, values: Mapping[str, Any]) -> None:
    """A directory belongs to one model and its settings, so that an interrupted probe goes on."""
    path = directory / "config.json"
    mine = json.dumps(dict(sorted(values.items())))
    if path.exists() and path.read_text() != mine:
        raise ConfigError(
            f"{path}: belongs to {path.read_text()[:200]}, this probe to {mine}; give --save "
            "another directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(path, mine)


def _args(harness: str, values: Mapping[str, Any], rollouts: int) -> SimpleNamespace:
    size = {"rollout_batch_size": rollouts, "n_samples_per_prompt": 1, "global_batch_size": 1}
    own = {**SETTINGS, **SHORT.get(harness, {}), **values, **size, "camp_harness": harness}
    with warnings.catch_warnings():
        # Each harness uses the settings that are its own.
        warnings.simplefilter("ignore", UnusedSettingWarning)
        args = build_config(own)
    if args.rollout_temperature != 1.0:
        raise ConfigError(
            f"rollout_temperature={args.rollout_temperature}: the probe compares log-probs at 1"
        )
    return args


def _episodes(args: SimpleNamespace, model: Any, store: Path, progress: Progress) -> list[Episode]:
    rollouts = Rollouts(args, model)
    session = rollouts.environment.start(rollouts.jobs(0)[0].task)
    session.close()
    if not hasattr(session, "demonstrate"):
        raise ConfigError(
            f"camp_environment={args.camp_environment!r}: its sessions have no demonstrate(), "
            "which the probe's schedule needs"
        )
    try:
        return collect(rollouts, 0, store, progress, _policy(rollouts))
    finally:
        rollouts.engine.close()


def _policy(rollouts: Rollouts) -> Policy:
    demonstrate = getattr(rollouts.harness, "demonstrate", lambda turn, prompt: "")

    def policy(
        engine: Engine, client: SGLangClient, session: Session, metadata: dict[str, Any]
    ) -> Engine:
        scheduled = metadata.setdefault("scheduled", [])
        return Scheduled(engine, client, rollouts.chat, demonstrate, session, scheduled)

    return policy
