"""What recording costs: its share of the time of a rollout step on the local engine.

python benchmarks/recording.py
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import camp_plugin.local.run as run
from camp_plugin.local.config import build_config, read_values
from camp_plugin.local.log import progress_bar
from camp_plugin.local.model import load_model
from harness_bridges import conversation
from harness_bridges.recorder import Recorder

HARNESSES = ("search_r1", "tc_rag", "agentfold", "memexrl", "compaction")
# Longer episodes than the demo's: a record grows with its turns.
SETTINGS = {"rollout_max_context_len": 2048, "camp_max_turns": 10}


@contextmanager
def timed(places: dict[str, tuple[Any, str]]) -> Iterator[dict[str, float]]:
    """Seconds that each of these functions took; they run in one thread, one after the other."""
    spent = dict.fromkeys(places, 0.0)
    originals = {name: getattr(owner, attribute) for name, (owner, attribute) in places.items()}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return originals[name](*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return call

    for name, (owner, attribute) in places.items():
        setattr(owner, attribute, wrap(name))
    try:
        yield spent
    finally:
        for name, (owner, attribute) in places.items():
            setattr(owner, attribute, originals[name])


def main() -> None:
    table = Table(title="Recording, as a share of the rollout step that it happens in")
    columns = ("harness", "rollout s", "model calls", "edits, checks", "store", "recording",
               "chat template")  # fmt: skip
    for header in columns:
        table.add_column(header, justify="left" if header == "harness" else "right")
    demo = read_values(Path(run.__file__).parents[1] / "demo.yaml", ())
    model = load_model(demo["hf_checkpoint"])
    places = {
        "add": (Recorder, "add"),
        "episode": (Recorder, "episode"),
        "store": (run, "append_episode"),
        "render": (conversation, "render_pieces"),
    }
    for harness in HARNESSES:
        args = build_config({**demo, **SETTINGS, "camp_harness": harness})
        rollouts = run.Rollouts(args, model)
        with tempfile.TemporaryDirectory() as scratch, progress_bar() as progress:
            store = Path(scratch) / "e.jsonl.zst"
            started = time.perf_counter()
            with timed(places) as spent:
                rollouts.run(rollouts.jobs(0), store, progress, harness)
            whole = time.perf_counter() - started
            calls = sum(len(e.turns) for e in run.read_episodes(store))
        rollouts.engine.close()
        made = spent["add"] + spent["episode"]
        shares = (made, spent["store"], made + spent["store"], spent["render"])
        cells = (f"{share / whole:.3%}" for share in shares)
        table.add_row(harness, f"{whole:.1f}", str(calls), *cells)
    table.caption = (
        "recording: turns, edits, the check that they replay, and the append to the store; a "
        "rollout without a record renders the chat template, too"
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
