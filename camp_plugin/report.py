"""Tables for the terminal and the plot of a demo run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

COLUMNS = (
    ("method", "method", ""),
    ("harness", "harness", ""),
    ("reward", "reward", ".3f"),
    ("camp/logdiff_mean", "logdiff mean", ".2e"),
    ("camp/logdiff_max", "logdiff max", ".2e"),
    ("camp/kl_sdcc", "KL (leaf)", ".3f"),
    ("loss_tokens", "loss tokens", ".0f"),
    ("train_tokens", "train tokens", ".0f"),
    ("camp/segments", "segments", ".2f"),
    ("camp/pack_ratio", "pack ratio", ".2f"),
    ("camp/edit_freq", "edit freq", ".2f"),
    ("camp/edit_depth", "edit depth", ".2f"),
    ("step_time_ratio", "step time", ".2f"),
)


def _cell(value: Any, spec: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "n/a"
    return format(value, spec)


def matrix(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The result matrix (002, Tables 1 and 9, in small)."""
    table = Table(title="Five methods on the same episodes, and the no-edit control")
    for _, header, spec in COLUMNS:
        table.add_column(header, justify="right" if spec else "left", no_wrap=not spec)
    for row in rows:
        table.add_row(*(_cell(row.get(key), spec) for key, _, spec in COLUMNS))
    table.caption = (
        "logdiff: |train - rollout log-prob| in nats, same weights. step time: relative to "
        "naive_compressed. tokens: of one optimizer step."
    )
    return table


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Drift and step cost of every method, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [row["method"] for row in rows]
    figure, (drift, cost) = plt.subplots(1, 2, figsize=(11, 4))
    exact = {"logit_tree", "packed_mask", "no_edit"}
    colours = ["#2a7f62" if name in exact else "#b5443c" for name in names]
    means = [row["camp/logdiff_mean"] for row in rows]
    peaks = [row["camp/logdiff_max"] for row in rows]
    drift.barh(names, means, color=colours)
    drift.plot(peaks, names, "k|", markersize=14, label="max")
    drift.set_xscale("log")
    drift.set_xlabel("logdiff (nats): mean, and max")
    drift.set_title("Train-inference drift")
    drift.legend(loc="lower right")
    cost.barh(names, [row["step_time_ratio"] for row in rows], color=colours)
    cost.axvline(1.0, color="k", linewidth=0.8)
    cost.set_xlabel("step time / naive_compressed")
    cost.set_title("Cost of one optimizer step")
    for axis in (drift, cost):
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def probe_tables(summary: Mapping[str, Any]) -> list[Table]:
    """The probe's result as tables."""
    drift = Table(title="Drift under each method's conditioning (nats)")
    for header in ("method", "logdiff mean", "logdiff max", "loss tokens"):
        drift.add_column(header, justify="left" if header == "method" else "right")
    for name, row in summary["methods"].items():
        mean, peak = row["camp/logdiff_mean"], row["camp/logdiff_max"]
        drift.add_row(name, _cell(mean, ".3e"), _cell(peak, ".3e"), str(row["loss_tokens"]))
    delta = Table(title="The two pitfalls (002, Table 7)")
    for header in ("quantity", "n", "mean", "share < 0", "share > 0"):
        delta.add_column(header, justify="left" if header == "quantity" else "right")
    for key in ("camp/delta_comp", "camp/delta_full"):
        row = summary[key]
        shares = (_cell(row[name], ".2f") for name in ("below_zero", "above_zero"))
        delta.add_row(key, str(row["n"]), _cell(row["mean"], "+.3f"), *shares)
    return [drift, delta]
