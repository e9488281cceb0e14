"""Eviction records recovered from payloads alone: 1,000 turns of 30,000 tokens.

python benchmarks/alignment.py
"""

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from harness_bridges import Turn, build_tape

TURNS, TOKENS, VOCAB = 1000, 30_000, 50_000


def turn(view: np.ndarray, out: np.ndarray) -> Turn:
    return Turn(
        prompt_ids=view,
        output_ids=out,
        output_logprobs=np.full(out.size, -0.1),
        finish_reason="stop",
        weight_version="0",
    )


def growing(rng: np.random.Generator) -> list[Turn]:
    """No edit: each prompt extends the last one."""
    view, turns = rng.integers(0, VOCAB, TOKENS // 2), []
    for _ in range(TURNS):
        out = rng.integers(0, VOCAB, 5)
        turns.append(turn(view, out))
        view = np.concatenate([view, out, rng.integers(0, VOCAB, 10)])
    return turns


def clearing(rng: np.random.Generator) -> list[Turn]:
    """An old tool result is replaced by a stub before every call."""
    view, turns = rng.integers(0, VOCAB, TOKENS), []
    for step in range(TURNS):
        out = rng.integers(0, VOCAB, 30)
        turns.append(turn(view, out))
        at = 2000 + step * 37 % 20_000
        view = np.concatenate([view, out, rng.integers(0, VOCAB, 170)])
        view = np.concatenate([view[:at], [7, 8, 9], view[at + 203 :]])
    return turns


def compacting(rng: np.random.Generator) -> list[Turn]:
    """At 30,000 tokens all but head and tail becomes a summary."""
    view, turns = rng.integers(0, VOCAB, 3000), []
    for _ in range(TURNS):
        out = rng.integers(0, VOCAB, 30)
        turns.append(turn(view, out))
        view = np.concatenate([view, out, rng.integers(0, VOCAB, 1000)])
        if view.size > TOKENS:
            view = np.concatenate([view[:1000], rng.integers(0, VOCAB, 500), view[-1500:]])
    return turns


def main() -> None:
    table = Table(title=f"Recovery of eviction records, {TURNS} turns of up to {TOKENS} tokens")
    for header in ("episode", "prompt tokens", "edits", "tape tokens", "seconds", "vs. growing"):
        table.add_column(header, justify="left" if header == "episode" else "right")
    base = 0.0
    for make in (growing, clearing, compacting):
        turns = make(np.random.default_rng(0))
        started = time.perf_counter()
        tape = build_tape(turns)
        seconds = time.perf_counter() - started
        base = base or seconds
        total = sum(t.prompt_ids.size for t in turns)
        counts = (f"{total / 1e6:.1f} M", str(len(tape.edits)), str(tape.tokens.size))
        table.add_row(make.__name__, *counts, f"{seconds:.1f}", f"{seconds / base:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
