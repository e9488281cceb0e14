"""Plots of a run, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
