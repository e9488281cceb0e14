"""Peak extra memory of the SDCC KL against the number of leaves: it does not grow with D times V.

Each size runs in a process of its own; the figure is the peak resident set during forward and
backward minus the resident set before it. The logits and their gradient (T x V, owned by the
trainer) exist in every variant and are listed apart.

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


def fused(logits: torch.Tensor, leaves: Leaves) -> torch.Tensor:
    none = torch.zeros(0, dtype=torch.int64)
    return token_stats(logits, none, none, leaves=leaves).leaf_kl.sum()


def naive(logits: torch.Tensor, leaves: Leaves) -> torch.Tensor:
    log_q = torch.log_softmax(logits[leaves.rows], -1)
    log_p = torch.log_softmax(leaves.teacher.logits(slice(None)), -1)
    return (log_p.exp() * (log_p - log_q)).sum()


def run(name: str, count: int, results: multiprocessing.Queue) -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB).requires_grad_()
    logits.grad = torch.zeros_like(logits)  # the trainer's buffer, there either way
    teacher = TeacherRows(torch.randn(count, HIDDEN) / HIDDEN**0.5, torch.randn(VOCAB, HIDDEN))
    leaves = Leaves(torch.randint(0, ROWS, (count,)), teacher)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak
    before = resident("VmRSS")
    started = time.perf_counter()
    kl = {"fused": fused, "naive": naive}[name](logits, leaves)
    kl.backward()
    results.put((resident("VmHWM") - before, time.perf_counter() - started))


def main() -> None:
    if not os.path.exists("/proc/self/clear_refs"):
        raise SystemExit("this benchmark reads the peak from /proc and needs Linux")
    table = Table(title=f"SDCC KL, V={VOCAB}, fp32: peak memory beyond logits and gradient (MiB)")
    for header in ("leaves D", "D x V x 4", "fused", "naive", "time fused / naive"):
        table.add_column(header, justify="right")
    context = multiprocessing.get_context("spawn")
    gradient = ROWS * VOCAB * 4 / MIB  # autograd's own buffer for the node's input, in both
    for count in (128, 512, 2048):
        peaks = {}
        for name in ("fused", "naive"):
            results = context.Queue()
            process = context.Process(target=run, args=(name, count, results))
            process.start()
            peaks[name] = results.get()
            process.join()
        extra = (f"{peaks[name][0] - gradient:.0f}" for name in ("fused", "naive"))
        ratio = f"{peaks['fused'][1] / peaks['naive'][1]:.2f}"
        table.add_row(str(count), f"{count * VOCAB * 4 / MIB:.0f}", *extra, ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
