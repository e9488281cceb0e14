"""Wall time and tokens of each method relative to `naive_compressed`, measured in one run.

Synthetic episodes with K = 0, 1, 4 and 16 interior evictions, and a store of recorded ones (the
demo's own, if it was run). One optimizer step's forward and backward, teacher pass included.
Times are ratios taken side by side: rounds go through all methods in turn, and the median round
counts. Random weights of SmolLM2's layer shapes: the arithmetic does not depend on their values.

    python benchmarks/methods.py [--episodes runs/demo/episodes_agentfold.jsonl.zst] [--rounds 3]
"""

import argparse
import random
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from camp_plugin.local.config import build_config
from camp_plugin.local.trainer import Trainer
from harness_bridges import Episode, Turn, read_episodes
from loss_hooks.host import use_host

METHODS = ("naive_compressed", "naive_full", "logit_tree", "packed_mask", "sdcc")
VOCAB = 8192


def model(layers: int) -> LlamaForCausalLM:
    """SmolLM2's layers, fewer of them, and a smaller vocabulary."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=16384,
            tie_word_embeddings=True,
        )
    ).eval()


def synthetic(evictions: int, rollout_id: int) -> Episode:
    """20 turns of 16 sampled and 40 observed tokens; old observations leave one by one."""
    rng = random.Random(1000 * evictions + rollout_id)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    view, turns, observed = tokens(200), [], []
    due = {int((i + 1) * 19 / (evictions + 1)) for i in range(evictions)}
    for step in range(20):
        if step in due and observed:
            start = observed.pop(0)
            del view[start : start + 40]
            observed = [at - 40 for at in observed]
        out = tokens(16)
        turns.append(
            Turn(
                prompt_ids=view,
                output_ids=out,
                output_logprobs=np.full(16, -5.0),
                finish_reason="stop",
                weight_version="0",
            )
        )
        view = view + out
        observed.append(len(view))
        view = view + tokens(40)
    ids = {"group_id": 0, "session_id": "", "task_id": ""}
    return Episode(turns=tuple(turns), rollout_id=rollout_id, reward=float(rollout_id), **ids)


def measure(net: LlamaForCausalLM, episodes: list[Episode], rounds: int, label: str) -> list[dict]:
    """Median seconds, forwarded tokens and loss tokens of every method."""
    trainers = {}
    for method in METHODS:
        settings = {
            "hf_checkpoint": "none",
            "camp_method": method,
            "rollout_batch_size": 1,
            "n_samples_per_prompt": len(episodes),
            "global_batch_size": len(episodes),
            "max_tokens_per_gpu": 4096,
        }
        if method == "sdcc":
            settings["sdcc_warmup_fraction"] = 0.0
        trainers[method] = Trainer(build_config(settings), net)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    counts: dict[str, dict[str, float]] = {}
    for method in track([*METHODS[:1], *METHODS * rounds], description=label):
        trainer = trainers[method]
        with use_host(trainer.host):
            data = trainer.prepare(episodes, 0)
            data["log_probs"] = data["ref_log_probs"] = None
            started = time.perf_counter()
            metrics = trainer.accumulate(data, 0, 0)
            seconds[method].append(time.perf_counter() - started)
        counts[method] = metrics
    seconds[METHODS[0]] = seconds[METHODS[0]][1:]  # the first pass only warmed up
    return [
        {
            "episodes": label,
            "method": method,
            "seconds": statistics.median(seconds[method]),
            "tokens": counts[method]["train_tokens"],
            "loss": counts[method]["loss_tokens"],
        }
        for method in METHODS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    net = model(arguments.layers)
    sets = [(f"K={k}", [synthetic(k, i) for i in range(2)]) for k in (0, 1, 4, 16)]
    recorded = arguments.episodes or Path("runs/demo/episodes_agentfold.jsonl.zst")
    if recorded.exists():
        sets.append(("recorded", [clip(e) for e in read_episodes(recorded)]))
    table = Table(
        title=f"One optimizer step, relative to naive_compressed ({arguments.layers} layers)"
    )
    for header in ("episodes", "method", "time", "tokens", "loss tokens"):
        table.add_column(header, justify="left" if header in ("episodes", "method") else "right")
    for label, episodes in sets:
        rows = measure(net, episodes, arguments.rounds, label)
        base = rows[0]
        for row in rows:
            ratios = (f"{row[k] / base[k]:.2f}" for k in ("seconds", "tokens", "loss"))
            table.add_row(row["episodes"], row["method"], *ratios)
        table.add_section()
    Console().print(table)


def clip(episode: Episode) -> Episode:
    """Recorded ids folded into the benchmark's vocabulary; lengths and forks stay."""
    turns = tuple(
        Turn(
            prompt_ids=turn.prompt_ids % VOCAB,
            output_ids=turn.output_ids % VOCAB,
            output_logprobs=turn.output_logprobs,
            finish_reason=turn.finish_reason,
            weight_version=turn.weight_version,
        )
        for turn in episode.turns
    )
    return Episode(
        turns=turns,
        edits=episode.edits,
        rollout_id=episode.rollout_id,
        group_id=0,
        session_id="",
        task_id="",
        reward=float(episode.rollout_id % 2),
    )


if __name__ == "__main__":
    main()
