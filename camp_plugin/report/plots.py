"""Plots of a run and of a demo, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness_bridges.errors import CampError

PANELS = (
    ("reward", "reward", "linear"),
    ("camp/logdiff_mean", "train-inference drift (nats)", "log"),
    ("camp/kl_sdcc", "KL live to compressed, per leaf (nats)", "linear"),
    ("camp/leaf_active", "micro-batches with leaves (act)", "linear"),
    ("camp/edit_freq", "episodes with evictions", "linear"),
    ("camp/edit_depth", "share evicted, where any was", "linear"),
    ("camp/evict_ratio", "share evicted, over all (ratio)", "linear"),
    ("camp/segments", "branches per rollout (seg)", "linear"),
    ("rows_per_batch", "rows per micro-batch (pack)", "linear"),
    ("camp/pack_ratio", "trie tokens / branch tokens", "linear"),
    ("camp/max_context", "longest context (tokens)", "linear"),
    ("step_time_s", "optimizer step (s)", "linear"),
)


def plot_run(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Every metric of a run over its optimizer steps, a line per method and harness.

    Args:
        rows: of `metrics.jsonl`; null is a gap.
        path: of the PNG file.
        title: of the figure.

    Raises:
        CampError: there is nothing to plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row.get("summary"):
            lines.setdefault(f"{row['method']}, {row['harness']}", []).append(row)
    if not lines:
        raise CampError(f"{title}: has no optimizer step to plot yet")
    figure, axes = plt.subplots(3, 4, figsize=(16, 9), sharex=True)
    for axis, (key, label, scale) in zip(axes.flat, PANELS, strict=True):
        for name, steps in lines.items():
            points = [(r["step"], r[key]) for r in steps if r.get(key) is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], ".-", label=name)
        axis.set_title(label, fontsize=10)
        if scale == "log" and any(r.get(key) for steps in lines.values() for r in steps):
            axis.set_yscale("log")
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=min(6, len(names)), frameon=False)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_matrix(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
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
