"""`camp-plugin`: train, demo, engine, probe, report, plot."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness_bridges.errors import CampError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; a user's fault prints one line and returns 2."""
    arguments = _parser().parse_args(argv)
    # As `python -m` does: a user's own environment or harness lies where the command is run.
    sys.path.insert(0, os.getcwd())
    warnings.showwarning = _show_warning
    try:
        arguments.run(arguments)
    except CampError as error:
        print(f"camp-plugin: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"camp-plugin: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name in ("camp_plugin", "loss_hooks", "rollout_adapters", "harness_bridges"):
            raise
        print(
            f"camp-plugin: the module {error.name!r} is missing; `pip install "
            "'camp-plugin[local]'` installs the embedded host",
            file=sys.stderr,
        )
        return 2
    return 0


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """A warning as one line, as errors are."""
    print(f"camp-plugin: warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="camp-plugin", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = _command(commands, "train", _train, "rollouts, hooks and updates on one machine")
    train.add_argument("--config", type=Path, required=True, help="YAML file of settings")
    _add_set(train)

    demo = _command(commands, "demo", _demo, "train all methods on the same episodes, compare")
    demo.add_argument("--config", type=Path, help="YAML file; default: the packaged demo")
    demo.add_argument("--methods", default="all", help="comma-separated; default: all five")
    _add_set(demo)

    engine = _command(commands, "engine", _engine, "serve SGLang's /generate on a local model")
    engine.add_argument("--model", required=True, help="model directory, or smollm2")
    engine.add_argument("--host", default="127.0.0.1")
    engine.add_argument("--port", type=int, default=30000)
    engine.add_argument("--seed", type=int, default=0)

    probe = _command(commands, "probe", _probe, "log-probs under each method's conditioning")
    probe.add_argument("episodes", type=Path, nargs="?", help="episodes, .jsonl or .jsonl.zst")
    probe.add_argument("--model", help="model directory, or smollm2 (default with --pitfalls)")
    probe.add_argument("--temperature", type=float, help="default: as recorded")
    probe.add_argument("--json", action="store_true", help="print JSON instead of tables")
    pitfalls = probe.add_argument_group("both pitfalls on scheduled episodes of every harness")
    pitfalls.add_argument("--pitfalls", action="store_true")
    pitfalls.add_argument("--harness", default="all", help="comma-separated; default: all")
    pitfalls.add_argument("--rollouts", type=int, default=32, help="of each harness; default: 32")
    pitfalls.add_argument("--save", type=Path, metavar="DIR", help="keep the episodes there")
    _add_set(pitfalls)

    report = _command(commands, "report", _report, "episodes as one HTML file to look at")
    report.add_argument("episodes", type=Path, help="episodes, .jsonl or .jsonl.zst")
    report.add_argument("--model", help="model directory, or smollm2: adds log-prob differences")
    report.add_argument("--temperature", type=float, help="default: as recorded")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"))

    plot = _command(commands, "plot", _plot, "a run's metrics as plots, and its means as a table")
    plot.add_argument("directory", type=Path, metavar="RUN", help="the run's directory")
    plot.add_argument("-o", "--output", type=Path, help="default: metrics.png in the run")
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_set(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting"
    )


def _train(arguments: argparse.Namespace) -> None:
    from camp_plugin.local.config import load_config
    from camp_plugin.local.run import train

    print(f"results: {train(load_config(arguments.config, arguments.set))}/")


def _demo(arguments: argparse.Namespace) -> None:
    from camp_plugin.local.config import read_values
    from camp_plugin.local.demo import METHODS, demo

    packaged = Path(__file__).with_name("demo.yaml")
    values = read_values(arguments.config or packaged, arguments.set)
    demo(values, METHODS if arguments.methods == "all" else arguments.methods.split(","))


def _engine(arguments: argparse.Namespace) -> None:
    from camp_plugin.local.run import serve_forever

    serve_forever(arguments.model, arguments.host, arguments.port, arguments.seed)


def _probe(arguments: argparse.Namespace) -> None:
    if arguments.pitfalls == (arguments.episodes is not None):
        raise CampError("probe: give either a file of episodes or --pitfalls")
    if arguments.pitfalls:
        _probe_pitfalls(arguments)
    else:
        _probe_episodes(arguments)


def _probe_episodes(arguments: argparse.Namespace) -> None:
    from camp_plugin.local.host import LocalHost
    from camp_plugin.local.log import progress_bar, start_bar
    from camp_plugin.local.model import load_model, model_dir
    from camp_plugin.probe import probe
    from camp_plugin.report.tables import probe_tables, wide_console
    from rollout_adapters.tokenizer import HFChat

    if arguments.model is None:
        raise CampError("--model: is missing; give the weights to score the episodes with")
    episodes = _read_episodes(arguments.episodes)
    chat = HFChat.from_pretrained(model_dir(arguments.model, "--model"))
    host = LocalHost(load_model(arguments.model, "--model"))
    with progress_bar(quiet=arguments.json) as progress:
        bar = start_bar(progress, "probe", len(episodes))
        result = probe(
            episodes,
            host,
            chat.decode,
            temperature=arguments.temperature,
            progress=lambda: progress.advance(bar),
        )
    if arguments.json:
        print(json.dumps(result.summary()))
        return
    for table in probe_tables(result.summary()):
        wide_console().print(table)
    print(f"junctions: {result.junctions}, of which re-tokenised text: {result.retokenised}")
    if result.too_long:
        print(f"tapes that naive_full cannot forward (the model's context): {result.too_long}")


def _read_episodes(path: Path) -> list[Any]:
    from harness_bridges.store import read_episodes

    if not path.is_file():
        raise CampError(f"{path}: there is no such file")
    return list(read_episodes(path))


def _probe_pitfalls(arguments: argparse.Namespace) -> None:
    from camp_plugin.local.config import read_values
    from camp_plugin.local.log import progress_bar
    from camp_plugin.local.model import load_model
    from camp_plugin.pitfalls import probe_pitfalls
    from camp_plugin.report.tables import pitfall_findings, pitfall_tables, wide_console
    from harness_bridges.harness import HARNESSES

    if arguments.temperature is not None:
        raise CampError("--temperature: has no effect with --pitfalls, which samples at 1")
    name = arguments.model or "smollm2"
    every = arguments.harness == "all"
    harnesses = HARNESSES.names() if every else arguments.harness.split(",")
    values = {**read_values(None, arguments.set), "hf_checkpoint": name}
    with progress_bar(quiet=arguments.json) as progress:
        found = probe_pitfalls(
            load_model(name, "--model"),
            list(dict.fromkeys(harnesses)),
            arguments.rollouts,
            values,
            progress,
            arguments.save,
        )
    findings = pitfall_findings(found)
    if arguments.json:
        print(json.dumps({"model": name, "harnesses": found, "findings": findings}))
        return
    for table in pitfall_tables(found):
        wide_console().print(table)
    print("\n".join(findings))


def _report(arguments: argparse.Namespace) -> None:
    from camp_plugin.local.host import LocalHost
    from camp_plugin.local.log import progress_bar, start_bar
    from camp_plugin.local.model import load_model, model_dir
    from camp_plugin.probe import sampling_temperature, tape_fits, target_log_probs
    from camp_plugin.report.viewer import write_report
    from loss_hooks.method import find_method
    from rollout_adapters.tokenizer import HFChat

    _check_output(arguments.output)
    episodes = _read_episodes(arguments.episodes)
    if not episodes:
        raise CampError(f"{arguments.episodes}: there is no episode in it")
    name = arguments.model or _model_of_run(arguments.episodes)
    decode = HFChat.from_pretrained(model_dir(name, "--model")).decode if name else None
    score = None
    if arguments.model:
        host = LocalHost(load_model(arguments.model, "--model"))
        conditionings = (
            ("walk", "naive_compressed"),
            ("full", "naive_full"),
            ("exact", "packed_mask"),
        )

        def score(episode: Any) -> dict[str, Any]:
            at = sampling_temperature(episode, arguments.temperature)
            return {
                key: target_log_probs(episode, find_method(method), host, at)[0]
                for key, method in conditionings
                if key != "full" or tape_fits(episode, host)
            }

    with progress_bar() as progress:
        bar = start_bar(progress, "report", len(episodes))
        write_report(
            episodes,
            arguments.output,
            title=arguments.episodes.name,
            decode=decode,
            score=score,
            progress=lambda: progress.advance(bar),
        )
    print(f"report: {arguments.output}")


def _model_of_run(episodes: Path) -> str | None:
    """The model of the run that the episodes lie in: its tokenizer gives them their text."""
    config = episodes.parent / "config.json"
    try:
        name: str = json.loads(config.read_text())["hf_checkpoint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"{config}: names no model ({type(error).__name__}), so tokens are shown as ids; "
            "--model gives them their text",
            stacklevel=2,
        )
        return None
    return name


def _check_output(path: Path) -> None:
    """Before any work: a result that has nowhere to go is lost."""
    if path.is_dir():
        raise CampError(f"{path}: is a directory; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()


def _plot(arguments: argparse.Namespace) -> None:
    from camp_plugin.report.plots import plot_run
    from camp_plugin.report.tables import activation, wide_console

    path = arguments.directory / "metrics.jsonl"
    if not path.is_file():
        raise CampError(f"{path}: there is no such file; give the directory of a run")
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise CampError(f"{path}: {error}; a line is damaged, the run rewrites it") from None
    output = arguments.output or arguments.directory / "metrics.png"
    if output.suffix not in (".png", ".pdf", ".svg"):
        raise CampError(f"{output}: name a .png, .pdf or .svg file")
    _check_output(output)
    plot_run(rows, output, str(arguments.directory))
    wide_console().print(activation(rows))
    print(f"plots: {output}")


if __name__ == "__main__":
    sys.exit(main())
