"""`camp-plugin demo`: one set of live-edited episodes, trained by every method."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.progress import Progress

from camp_plugin.local.config import UnusedSettingWarning, build_config
from camp_plugin.local.log import MetricsLog, progress_bar, start_bar
from camp_plugin.local.model import load_model
from camp_plugin.local.run import (
    Rollouts,
    check_same_run,
    claim_directory,
    collect,
    set_threads,
)
from camp_plugin.local.trainer import Trainer
from camp_plugin.report.plots import plot_matrix
from camp_plugin.report.tables import matrix, wide_console
from harness_bridges.errors import ConfigError
from harness_bridges.record import Episode
from rollout_adapters.metrics import episode_metrics

METHODS = ("naive_compressed", "naive_full", "logit_tree", "packed_mask", "sdcc")
YARDSTICK = "naive_compressed"
CONTROL = "no_edit"
CONTROL_HARNESS = "search_r1"


def demo(values: Mapping[str, Any], methods: Sequence[str]) -> Path:
    """Roll out with and without the editor, train every method from the same weights, compare.

    Args:
        values: settings, as in a config file, without `camp_method`.
        methods: which to train; `naive_compressed`, the yardstick of cost, always is.

    Returns:
        The run's directory: `episodes_*.jsonl.zst`, `metrics.jsonl`, `tensorboard/`, `matrix.png`.
    """
    names = list(dict.fromkeys([YARDSTICK, *methods]))
    with warnings.catch_warnings():
        # Each cell uses the settings of its own harness and method.
        warnings.simplefilter("ignore", UnusedSettingWarning)
        args = {name: build_config({**values, "camp_method": name}) for name in names}
        unedited = {"camp_harness": CONTROL_HARNESS, "camp_method": YARDSTICK}
        control = build_config({**values, **unedited})
    used = {key for cell in args.values() for key in vars(cell)}
    if unused := [key for key in values if key not in used]:
        warnings.warn(
            f"{', '.join(unused)}: no effect in this demo", UnusedSettingWarning, stacklevel=2
        )
    first = next(iter(args.values()))
    set_threads(first)
    torch.manual_seed(first.seed)
    directory = Path(str(first.runs_dir)) / str(first.run_name)
    if (directory / "matrix.png").exists():
        raise ConfigError(f"{directory}: holds a finished demo; remove it or set another run_name")
    check_same_run(directory, first)  # an interrupted demo goes on with its stored episodes
    model = load_model(first.hf_checkpoint)
    claim_directory(directory, first)
    initial = {name: weight.clone() for name, weight in model.state_dict().items()}
    log = MetricsLog(directory)
    with progress_bar() as progress:
        episodes = _collect(first, model, directory, progress)
        control_episodes = _collect(control, model, directory, progress)
        # The control goes first: it also warms the machine up for the timed ones.
        cells = [(CONTROL, control, control_episodes)]
        cells += [(name, args[name], episodes) for name in names]
        rows = []
        for name, cell, data in cells:
            model.load_state_dict(initial)
            rows.append(_train_cell(name, cell, model, data, log, progress))
    rows = _with_ratios([*rows[1:], rows[0]])
    for row in rows:
        log.write(row["method"], int(row["steps"]), {**row, "summary": True})
    log.close()
    plot_matrix(rows, directory / "matrix.png")
    console = wide_console()
    console.print(matrix(rows))
    console.print(f"results: {directory}/ (metrics.jsonl, tensorboard/, matrix.png, episodes)")
    store = directory / f"episodes_{first.camp_harness}.jsonl.zst"
    console.print(f"look at them: camp-plugin report {store} --model {first.hf_checkpoint}")
    return directory


def _collect(
    args: SimpleNamespace, model: Any, directory: Path, progress: Progress
) -> list[Episode]:
    rollouts = Rollouts(args, model)
    store = directory / f"episodes_{args.camp_harness}.jsonl.zst"
    episodes = [
        episode
        for step in range(args.num_rollout)
        for episode in collect(rollouts, step, store, progress)
    ]
    rollouts.engine.close()
    return episodes


def _train_cell(
    name: str,
    args: SimpleNamespace,
    model: Any,
    episodes: Sequence[Episode],
    log: MetricsLog,
    progress: Progress,
) -> dict[str, Any]:
    trainer = Trainer(args, model, load_model(args.hf_checkpoint) if args.use_kl_loss else None)
    bar = start_bar(progress, f"train {name}")
    size = args.rollout_batch_size * args.n_samples_per_prompt
    about = {"method": name, "harness": args.camp_harness}
    steps: list[dict[str, float]] = []
    for rollout in range(args.num_rollout):
        part = episodes[rollout * size : (rollout + 1) * size]
        found = trainer.train(part, rollout, lambda n: progress.advance(bar, n))
        for metrics in found:
            row = {**about, "rollout": rollout, **episode_metrics(part), **metrics}
            log.write(name, len(steps), row)
            steps.append(metrics)
    progress.update(bar, total=progress.tasks[bar].completed)
    return {**about, **episode_metrics(episodes), **_mean(steps), "steps": len(steps)}


def _mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    base = next(row for row in rows if row["method"] == YARDSTICK)
    for row in rows:
        row["step_time_ratio"] = row["step_time_s"] / base["step_time_s"]
    return rows
