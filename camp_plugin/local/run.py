"""`camp-plugin train`: rollouts, hooks, update, new weights for the engine, and again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.progress import Progress

from camp_plugin.local.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from camp_plugin.local.config import component_config
from camp_plugin.local.decoder import Decoder
from camp_plugin.local.engine import LocalEngine, serve
from camp_plugin.local.log import MetricsLog, progress_bar, replace_file, start_bar
from camp_plugin.local.model import load_model, model_dir
from camp_plugin.local.trainer import Trainer
from harness_bridges.errors import ConfigError
from harness_bridges.harness import find_harness
from harness_bridges.record import Episode
from harness_bridges.store import append_episode, read_episodes
from rollout_adapters.environments.registry import find_environment
from rollout_adapters.metrics import episode_metrics
from rollout_adapters.rollout import Job, Policy, limits_from_args, plan_jobs, run_episodes
from rollout_adapters.sandbox.config import SandboxConfig
from rollout_adapters.sandbox.sandbox import Sandbox
from rollout_adapters.sglang import SGLangClient
from rollout_adapters.tokenizer import HFChat


def set_threads(args: SimpleNamespace) -> None:
    """Apply `cpu_threads`."""
    if args.cpu_threads is not None:
        torch.set_num_threads(args.cpu_threads)


class Rollouts:
    """Samples episodes of one environment and harness through the engine's HTTP face."""

    def __init__(self, args: SimpleNamespace, model: Any) -> None:
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and args.rollout_max_context_len > longest:
            raise ConfigError(
                f"rollout_max_context_len={args.rollout_max_context_len}: the model's context is "
                f"{longest} tokens"
            )
        self.args = args
        self.chat = HFChat.from_pretrained(model_dir(args.hf_checkpoint))
        environment = find_environment(args.camp_environment)
        self.environment = environment(component_config(environment.Config, args))
        harness = find_harness(args.camp_harness)
        self.harness = harness(component_config(harness.Config, args))
        self.sandbox = Sandbox(component_config(SandboxConfig, args))
        decoder = Decoder(model, eos_ids=self.chat.eos_ids, decode_text=self.chat.decode)
        self.engine = LocalEngine(decoder, seed=args.seed)

    def jobs(self, step: int) -> list[Job]:
        """The episodes of a rollout step."""
        tasks = self.environment.tasks("train")
        return plan_jobs(tasks, step, self.args.rollout_batch_size, self.args.n_samples_per_prompt)

    def run(
        self,
        jobs: Sequence[Job],
        store: Path,
        progress: Progress,
        label: str,
        policy: Policy | None = None,
    ) -> None:
        """Run the episodes and append each to the store as soon as it is finished."""
        bar = start_bar(progress, label, len(jobs))
        with serve(self.engine) as url:
            asyncio.run(self._run(jobs, url, store, lambda: progress.advance(bar), policy))

    async def _run(
        self, jobs: Sequence[Job], url: str, store: Path, advance: Any, policy: Policy | None
    ) -> None:
        async with SGLangClient(url) as client:
            episodes = run_episodes(
                jobs,
                client=client,
                chat=self.chat,
                environment=self.environment,
                harness=self.harness,
                limits=limits_from_args(self.args),
                seed=self.args.seed,
                sandbox=self.sandbox,
                policy=policy,
            )
            async for episode in episodes:
                append_episode(store, episode)
                advance()


def collect(
    rollouts: Rollouts,
    step: int,
    store: Path,
    progress: Progress,
    policy: Policy | None = None,
) -> list[Episode]:
    """One rollout step's episodes, in order; those already in the store are not run again."""
    jobs = rollouts.jobs(step)
    have = _stored(store, jobs)
    missing = [job for job in jobs if job.rollout_id not in have]
    if missing:
        label = f"rollout {step} ({rollouts.args.camp_harness})"
        rollouts.run(missing, store, progress, label, policy)
        have = _stored(store, jobs)
    return [have[job.rollout_id] for job in jobs]


def _stored(store: Path, jobs: Sequence[Job]) -> dict[int, Episode]:
    if not store.exists():
        return {}
    wanted = {job.rollout_id for job in jobs}
    return {e.rollout_id: e for e in read_episodes(store) if e.rollout_id in wanted}


def train(args: SimpleNamespace) -> Path:
    """Run the whole training loop; returns the run's directory.

    Interrupted at any point, the same command goes on: from the last complete checkpoint, with
    the episodes that were already stored.
    """
    set_threads(args)
    torch.manual_seed(args.seed)
    directory = Path(str(args.runs_dir)) / str(args.run_name)
    check_same_run(directory, args)
    model = load_model(args.hf_checkpoint)
    reference = load_model(args.ref_load or args.hf_checkpoint) if args.use_kl_loss else None
    trainer = Trainer(args, model, reference)
    first = _resume(directory, args, trainer)
    source = _source(args, model, trainer)
    claim_directory(directory, args)
    log = MetricsLog(directory, trainer.updates)
    with progress_bar() as progress:
        for step in range(first, args.num_rollout):
            episodes = _episodes(source, args, step, directory, progress)
            train_and_log(trainer, episodes, step, log, progress)
            if isinstance(source, Rollouts):
                source.engine.update_weights(str(trainer.updates))
            if (step + 1) % args.save_interval == 0 or step + 1 == args.num_rollout:
                state = {
                    "rollout_id": step + 1,
                    "updates": trainer.updates,
                    "run_name": args.run_name,
                }
                save_checkpoint(
                    _checkpoints(directory, args),
                    model=model,
                    optimizer=trainer.optimizer,
                    state=state,
                )
    log.close()
    return directory


def _checkpoints(directory: Path, args: SimpleNamespace) -> Path:
    return Path(args.save) if args.save else directory / "checkpoint"


def check_same_run(directory: Path, args: SimpleNamespace) -> None:
    """A directory belongs to one configuration: mixing two would mix their episodes."""
    path = directory / "config.json"
    if not path.exists():
        return
    mine = vars(args)
    free = {"num_rollout", "cpu_threads", "save_interval"}
    theirs = json.loads(path.read_text())
    changed = [k for k in mine if k not in free and mine[k] != theirs.get(k)]
    if changed:
        raise ConfigError(
            f"{directory}: was started with another {', '.join(changed)} "
            f"({', '.join(repr(theirs.get(k)) for k in changed)}); choose another run_name"
        )


def claim_directory(directory: Path, args: SimpleNamespace) -> None:
    """Write the configuration that the directory belongs to from now on."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(dict(sorted(vars(args).items())), indent=1)
    replace_file(directory / "config.json", settings)


def _resume(directory: Path, args: SimpleNamespace, trainer: Trainer) -> int:
    path = latest_checkpoint(_checkpoints(directory, args))
    if path is None:
        return 0
    state = load_checkpoint(path, model=trainer.model, optimizer=trainer.optimizer)
    if state["run_name"] != args.run_name:
        raise ConfigError(
            f"save={args.save!r}: holds a checkpoint of run {state['run_name']!r}, not of "
            f"{args.run_name!r}; give every run a directory of its own"
        )
    trainer.updates = state["updates"]
    return int(state["rollout_id"])


def _source(args: SimpleNamespace, model: Any, trainer: Trainer) -> Rollouts | list[Episode]:
    if args.load_debug_rollout_data:
        if not Path(args.load_debug_rollout_data).is_file():
            raise ConfigError(
                f"load_debug_rollout_data={args.load_debug_rollout_data!r}: there is no such file"
            )
        # Stores are in the order in which episodes finished.
        stored = read_episodes(args.load_debug_rollout_data)
        return sorted(stored, key=lambda episode: episode.rollout_id)
    rollouts = Rollouts(args, model)
    rollouts.engine.update_weights(str(trainer.updates))
    return rollouts


def _episodes(
    source: Rollouts | list[Episode],
    args: SimpleNamespace,
    step: int,
    directory: Path,
    progress: Progress,
) -> list[Episode]:
    if isinstance(source, Rollouts):
        return collect(source, step, directory / "episodes.jsonl.zst", progress)
    size = args.rollout_batch_size * args.n_samples_per_prompt
    part = source[step * size : (step + 1) * size]
    if len(part) < size:
        raise ConfigError(
            f"load_debug_rollout_data: holds {len(source)} episodes, rollout step {step} needs "
            f"{size}; lower num_rollout, rollout_batch_size or n_samples_per_prompt"
        )
    inside = Counter(episode.group_id for episode in part)
    everywhere = Counter(episode.group_id for episode in source)
    split = [group for group, count in inside.items() if count != everywhere[group]]
    if split:
        raise ConfigError(
            f"load_debug_rollout_data: rollout step {step} would split group {split[0]}, whose "
            "advantages need all its episodes; set rollout_batch_size and n_samples_per_prompt "
            "as they were when it was sampled"
        )
    return part


def train_and_log(
    trainer: Trainer,
    episodes: Sequence[Episode],
    step: int,
    log: MetricsLog,
    progress: Progress,
) -> dict[str, Any]:
    """Train on one rollout step, log every optimizer step, return the last row."""
    name = trainer.args.camp_method
    bar = start_bar(progress, f"train {name}")
    row: dict[str, Any] = {}
    before = trainer.updates
    rows = trainer.train(episodes, step, lambda tokens: progress.advance(bar, tokens))
    progress.update(bar, total=progress.tasks[bar].completed)
    about = {
        "method": name,
        "harness": trainer.args.camp_harness,
        "rollout": step,
        **episode_metrics(episodes),
    }
    for i, metrics in enumerate(rows):
        row = {**about, **metrics}
        log.write(name, before + i, row)
    return row


def serve_forever(model: str, host: str, port: int, seed: int) -> None:
    """`camp-plugin engine`: serve until interrupted."""
    chat = HFChat.from_pretrained(model_dir(model, "--model"))
    decoder = Decoder(load_model(model, "--model"), eos_ids=chat.eos_ids, decode_text=chat.decode)
    engine = LocalEngine(decoder, seed=seed)
    with serve(engine, host, port) as url:
        print(f"serving {model} at {url}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("stopped")
