"""What a run shows and keeps: progress bars, metrics, TensorBoard scalars."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Progress]:
    """The one look of all progress bars, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet) as progress:
        yield progress


def start_bar(progress: Progress, label: str, total: float | None = None) -> TaskID:
    """A new bar; where there is no terminal to draw it on, a line that says what begins."""
    if not progress.console.is_terminal and not progress.disable:
        progress.console.print(f"{label} ...")
    return progress.add_task(label, total=total)


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    os.replace(scratch, path)


class MetricsLog:
    """`metrics.jsonl` and TensorBoard scalars; NaN becomes null in the file."""

    def __init__(self, directory: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "metrics.jsonl"
        self._directory = directory / "tensorboard"
        self._writers: dict[str, Any] = {}
        self._make_writer: Callable[[str], Any] = partial(SummaryWriter, purge_step=first_step)
        self._drop_from(first_step)

    def _drop_from(self, step: int) -> None:
        """Forget steps that a resumed run is about to take again."""
        if self._path.exists():
            lines = self._path.read_text().splitlines(keepends=True)
            kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] < step]
            replace_file(self._path, "".join(kept))

    def write(self, run: str, step: int, row: Mapping[str, Any]) -> None:
        """One row; `run` is the TensorBoard run it belongs to."""
        clean = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **clean}) + "\n")
        if run not in self._writers:
            self._writers[run] = self._make_writer(str(self._directory / run))
        for name, value in clean.items():
            if isinstance(value, int | float):
                self._writers[run].add_scalar(name, value, step)
        self._writers[run].flush()

    def close(self) -> None:
        """Flush and close the TensorBoard writers."""
        for writer in self._writers.values():
            writer.close()
