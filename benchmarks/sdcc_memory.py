"""Peak memory that the SDCC KL adds to a task loss: it does not grow with D times V.

Each variant runs in a process of its own: the log-probs of all rows alone, with the KL in the same
node (ours), and with the KL by its definition beside it. The figure is the peak resident set of
forward and backward beyond that of the task alone.

    python benchmarks/sdcc_memory.py
"""

import multiprocessing
import os
import time

import torch
from rich.console import Console
from rich.table import Table

from loss_hooks.token_stats import Leaves, TeacherRows, token_stats

VOCAB, HIDDEN, ROWS = 49152, 576, 2048
MIB = 2**20


def resident(field: str) -> float:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) / 1024


def loss(variant: str, logits: torch.Tensor, leaves: Leaves) -> torch.Tensor:
    rows = torch.arange(ROWS - 1)
    targets = torch.randint(0, VOCAB, (ROWS - 1,))
    stats = token_stats(logits, rows, targets, leaves=leaves if variant == "fused" else None)
    task = stats.log_probs.sum()
    if variant == "task":
        return task
    if variant == "fused":
        return task + stats.leaf_kl.sum()
    log_q = torch.log_softmax(logits[leaves.rows], -1)
    log_p = torch.log_softmax(leaves.teacher.logits(slice(None)), -1)
    return task + (log_p.exp() * (log_p - log_q)).sum()


def run(variant: str, count: int, results: multiprocessing.Queue) -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB).requires_grad_()
    teacher = TeacherRows(torch.randn(count, HIDDEN) / HIDDEN**0.5, torch.randn(VOCAB, HIDDEN))
    leaves = Leaves(torch.randint(0, ROWS, (count,)), teacher)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak
    before = resident("VmRSS")
    started = time.perf_counter()
    loss(variant, logits, leaves).backward()
    results.put((resident("VmHWM") - before, time.perf_counter() - started))


def main() -> None:
    if not os.path.exists("/proc/self/clear_refs"):
        raise SystemExit("this benchmark reads the peak from /proc and needs Linux")
    table = Table(title=f"SDCC KL beside a task loss, V={VOCAB}, T={ROWS}, fp32")
    for header in ("leaves D", "D x V (MiB)", "fused adds", "naive adds", "time fused / naive"):
        table.add_column(header, justify="right")
    context = multiprocessing.get_context("spawn")
    for count in (512, 2048, 4096):
        found = {}
        for variant in ("task", "fused", "naive"):
            results = context.Queue()
            process = context.Process(target=run, args=(variant, count, results))
            process.start()
            found[variant] = results.get()
            process.join()
        added = (f"{found[v][0] - found['task'][0]:.0f} MiB" for v in ("fused", "naive"))
        ratio = f"{found['fused'][1] / found['naive'][1]:.2f}"
        table.add_row(str(count), f"{count * VOCAB * 4 / MIB:.0f}", *added, ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
