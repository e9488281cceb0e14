"""Tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
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


def wide_console() -> Console:
    """Standard output; where it is no terminal, wide enough that no column is cut."""
    return Console(width=None if Console().is_terminal else 180)


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


def pitfall_tables(found: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """The pitfall probe: trees and both pitfalls per harness (002, Tables 3 and 7), and the same
    by who wrote the token."""
    table = Table(title="The two pitfalls per harness (002, Tables 3 and 7)")
    for header in ("harness", "K", "D", "mean |E|"):
        table.add_column(header, justify="left" if header == "harness" else "right")
    for symbol in ("Δcomp", "Δfull"):
        for header in ("n", "mean", "majority"):
            table.add_column(f"{symbol} {header}", justify="right")
    parts = Table(title="The same, by who wrote the token: mean in nats (n)")
    for header in ("harness", "Δcomp sampled", "scheduled", "Δfull sampled", "scheduled"):
        parts.add_column(header, justify="left" if header == "harness" else "right")
    for name, row in found.items():
        tree = (_cell(row[key], ".2f") for key in ("junctions", "diverging_leaves", "evicted"))
        both = (row["delta_comp"], row["delta_full"])
        table.add_row(name, *tree, *(cell for delta in both for cell in _signs(delta)))
        split = (delta[who] for delta in both for who in ("sampled", "scheduled"))
        parts.add_row(name, *(f"{_cell(d['mean'], '+.3f')} ({d['n']})" for d in split))
    table.caption = "nats; majority: the sign that most tokens have, and their share"
    return [table, parts]


def _signs(delta: Mapping[str, Any]) -> tuple[str, str, str]:
    share = delta["majority_share"]
    majority = "n/a" if share is None else f"{delta['majority_sign']} {share:.2f}"
    return str(delta["n"]), _cell(delta["mean"], "+.3f"), majority


def pitfall_findings(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where the predicted signs (Δcomp < 0, Δfull > 0) come out, where not, and why."""
    lines = []
    for key, symbol, sign in (("delta_comp", "Δcomp", "< 0"), ("delta_full", "Δfull", "> 0")):
        by = {
            holds: [name for name, row in found.items() if row[key]["holds"] is holds]
            for holds in (True, False, None)
        }
        lines.append(
            f"{symbol} {sign} in mean and majority: {', '.join(by[True]) or 'nowhere'}; "
            f"not: {', '.join(by[False]) or 'nowhere'}; "
            f"nothing to measure: {', '.join(by[None]) or 'nowhere'}."
        )
    if any(row["delta_comp"]["holds"] is None for row in found.values()):
        lines.append(
            "Δcomp has nothing to measure where no token of an earlier context is in the last one: "
            "without edits, or where the whole history is replaced."
        )
    if any(row["delta_full"]["holds"] is False for row in found.values()):
        lines.append(
            "Δfull is positive only for tokens that the removed text makes likelier. A sampled "
            "token is, on average, never likelier under another context than under the one that "
            "it was sampled from: the mean is minus a KL divergence. So after the last edit, where "
            "the walk is the live context, sampled tokens pull Δfull below 0, and what is positive "
            "comes from tokens that the schedule wrote knowing what was removed."
        )
    return lines


def activation(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Run means per method and harness: eviction density and each method's own channel (002,
    Tables 10 and 11)."""
    table = Table(title="Run means (002, Tables 10 and 11)")
    for header in ("harness", "method"):
        table.add_column(header)
    for header in ("sess. w/ evict", "ratio", "drift", "seg", "pack", "KL 1e-3", "act"):
        table.add_column(header, justify="right")
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row.get("summary"):
            cells.setdefault((row["harness"], row["method"]), []).append(row)
    for (harness, method), steps in cells.items():
        kl = _mean(steps, "camp/kl_sdcc")
        table.add_row(
            harness,
            method,
            _sessions(steps),
            _cell(_mean(steps, "camp/evict_ratio"), ".3f"),
            _cell(_mean(steps, "camp/logdiff_mean"), ".2e"),
            _cell(_mean(steps, "camp/segments") if method == "logit_tree" else None, ".2f"),
            _cell(_mean(steps, "rows_per_batch") if method == "packed_mask" else None, ".2f"),
            _cell(None if kl is None else 1e3 * kl, ".2f"),
            _cell(_mean(steps, "camp/leaf_active"), ".2f"),
        )
    return table


def _sessions(steps: Sequence[Mapping[str, Any]]) -> str:
    """Episodes with evictions / episodes; the optimizer steps of one rollout step share theirs."""
    rollouts = {step.get("rollout"): step for step in steps}
    if None in rollouts:
        return "n/a"  # of a run that did not count them yet
    evicted = sum(step["camp/evict_sessions"] for step in rollouts.values())
    return f"{evicted:.0f}/{sum(step['camp/sessions'] for step in rollouts.values()):.0f}"


def _mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [step[key] for step in steps if step.get(key) is not None]
    return sum(values) / len(values) if values else None
