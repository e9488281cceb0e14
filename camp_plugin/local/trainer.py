"""The embedded trainer: slime's hooks in slime's order on one model in one process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from camp_plugin.local.host import LocalHost, make_reducer
from harness_bridges.errors import CampError
from harness_bridges.record import Episode
from loss_hooks.host import use_host
from loss_hooks.method import find_method
from rollout_adapters.samples import Sample, episode_samples

Progress = Callable[[int], None]
"""Called with the number of tokens that were just trained."""


def load_function(path: str) -> Any:
    """slime's way of finding a hook: import the module, get the attribute."""
    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute)


LEAF_ACTIVE = "camp/leaf_active"


class Trainer:
    """Model, optimizer and the hooks of one method."""

    def __init__(self, args: SimpleNamespace, model: Any, ref_model: Any = None) -> None:
        self.args, self.model, self.ref_model = args, model, ref_model
        self.method = find_method(args.camp_method)
        self.host = LocalHost(model)
        self.ref_host = None if ref_model is None else LocalHost(ref_model)
        self.updates = 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
        )
        self._convert = load_function("camp_plugin.convert_samples_to_train_data")
        self._postprocess = load_function("camp_plugin.rollout_data_postprocess")

    def train(
        self, episodes: Sequence[Episode], rollout_id: int, progress: Progress = lambda n: None
    ) -> list[dict[str, float]]:
        """All optimizer steps on one rollout step's episodes; one dict of metrics per step.

        Raises:
            CampError: an episode cannot be trained, or a loss or gradient is not finite; the
                weights are left as they were before that step.
        """
        with use_host(self.host):
            data = self.prepare(episodes, rollout_id)
            steps = sorted(set(data["step_ids"]))
            self.host.drift.reset()
            self.host.drift.enabled = True
            data["log_probs"] = self._log_probs(data, self.host) if len(steps) > 1 else None
            # Only this pass, or a single step's own forward, has the sampler's weights.
            self.host.drift.enabled = len(steps) == 1
            data["ref_log_probs"] = None
            if self.args.use_kl_loss:
                if self.ref_host is None:
                    raise CampError("use_kl_loss: the trainer was built without a reference model")
                data["ref_log_probs"] = self._log_probs(data, self.ref_host)
            metrics = [self._step(data, rollout_id, step, progress) for step in steps]
            return [{**m, **self.host.drift.metrics()} for m in metrics]

    def prepare(self, episodes: Sequence[Episode], rollout_id: int) -> dict[str, Any]:
        """Episodes to slime's train data: rows by the method, advantages, steps, records."""
        _check_episodes(episodes)
        samples: list[Sample] = []
        for episode in episodes:
            sampled_at = episode.metadata.get("temperature", self.args.rollout_temperature)
            if sampled_at != self.args.rollout_temperature:
                raise CampError(
                    f"episode {episode.rollout_id}: was sampled at temperature {sampled_at}, "
                    f"rollout_temperature={self.args.rollout_temperature}; train at the same one"
                )
            samples += episode_samples(episode, self.method, len(samples))
        raw: Mapping[str, list[Any]] = self._convert(self.args, samples)
        data: dict[str, Any] = dict(raw)
        data["tokens"] = [torch.tensor(t, dtype=torch.int64) for t in raw["tokens"]]
        data["loss_masks"] = [torch.tensor(m, dtype=torch.int32) for m in raw["loss_masks"]]
        data["rollout_mask_sums"] = [torch.tensor(float(s)) for s in raw["rollout_mask_sums"]]
        double = torch.float64
        log_probs = raw["rollout_log_probs"]
        data["rollout_log_probs"] = [torch.tensor(p, dtype=double) for p in log_probs]
        data["advantages"] = [
            torch.full((int(size),), float(reward), dtype=double)
            for size, reward in zip(raw["response_lengths"], raw["rewards"], strict=True)
        ]
        data["step_ids"] = self._step_ids(raw["rollout_ids"])
        self._postprocess(self.args, rollout_id, data)
        return data

    def _step_ids(self, rollout_ids: Sequence[int]) -> list[int]:
        """Steps count rollouts, not rows: all rows of a rollout are in one step."""
        order = {rollout: i for i, rollout in enumerate(dict.fromkeys(rollout_ids))}
        size = self.args.global_batch_size
        if len(order) % size:
            raise CampError(
                f"{len(order)} episodes do not fill steps of global_batch_size={size}; change it "
                "so that it divides their number, or episodes would be dropped"
            )
        return [order[rollout] // size for rollout in rollout_ids]

    def micro_batches(self, data: Mapping[str, Any], step: int | None) -> Iterable[dict[str, Any]]:
        """Rows of a step (None: of all), packed in order under the token budget."""
        chosen = [i for i, s in enumerate(data["step_ids"]) if step is None or s == step]
        batch: list[int] = []
        size = 0
        for i in chosen:
            length = data["tokens"][i].numel()
            if batch and size + length > self.args.max_tokens_per_gpu:
                yield _select(data, batch)
                batch, size = [], 0
            batch.append(i)
            size += length
        if batch:
            yield _select(data, batch)

    @torch.no_grad()
    def _log_probs(self, data: Mapping[str, Any], host: LocalHost) -> list[Tensor]:
        found: list[Tensor] = []
        for batch in self.micro_batches(data, None):
            rows = host.log_probs(self.args, batch, host.logits(batch))
            found += rows
            if host is self.host:
                host.drift.add(torch.cat(rows), batch)
        return found

    def _step(
        self, data: Mapping[str, Any], rollout_id: int, step: int, progress: Progress
    ) -> dict[str, float]:
        started = time.perf_counter()
        metrics = self.accumulate(data, rollout_id, step, progress)
        metrics["grad_norm"] = self._update()
        metrics["step_time_s"] = time.perf_counter() - started
        return metrics

    def accumulate(
        self,
        data: Mapping[str, Any],
        rollout_id: int,
        step: int,
        progress: Progress = lambda n: None,
    ) -> dict[str, float]:
        """Gradients of one optimizer step in `.grad`, summed over its micro-batches."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.method.before_train_step is not None:
            hook = self.method.before_train_step
            hook(self.args, rollout_id, step, self.model, self.optimizer, None)
        totals: dict[str, float] = {}
        tokens = loss_tokens = masked_rows = batches = active = 0
        for batch in self.micro_batches(data, step):
            size = batch["tokens"].numel()
            tokens += size
            loss_tokens += sum(int(mask.sum()) for mask in batch["loss_masks"])
            masked_rows += sum(not bool(mask.any()) for mask in batch["loss_masks"])
            found = {name: float(value) for name, value in self._micro_batch(batch).items()}
            batches += 1
            active += found.get(LEAF_ACTIVE, 0.0) > 0
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value
            progress(size)
        means = {name: total / self.args.global_batch_size for name, total in totals.items()}
        if LEAF_ACTIVE in means:  # of micro-batches (002, Table 11); a hook cannot count those
            means[LEAF_ACTIVE] = active / batches
        means["rows_per_batch"] = sum(x == step for x in data["step_ids"]) / batches
        counts = {
            "train_tokens": tokens,
            "loss_tokens": loss_tokens,
            "masked_rows": masked_rows,
        }
        return {**means, **{name: float(count) for name, count in counts.items()}}

    def _micro_batch(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        logits = self.host.logits(batch)
        loss, metrics = self.method.loss(self.args, batch, logits, make_reducer(batch))
        if not bool(torch.isfinite(loss)):
            self.optimizer.zero_grad(set_to_none=True)
            rollouts = sorted(set(batch["rollout_ids"]))
            raise CampError(
                f"loss={float(loss.detach())} on rollouts {rollouts}: the step was not taken; "
                "check the weights and the recorded log-probs of these episodes"
            )
        (loss / self.args.global_batch_size).backward()
        return metrics

    def _update(self) -> float:
        limit = self.args.clip_grad if self.args.clip_grad > 0 else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if not norm < float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise CampError(f"grad_norm={norm}: the step was not taken; lower lr or check the data")
        self.optimizer.step()
        self.updates += 1
        return norm


def _check_episodes(episodes: Sequence[Episode]) -> None:
    """Each rollout once, and whole."""
    repeated = [i for i, n in Counter(e.rollout_id for e in episodes).items() if n > 1]
    if repeated:
        raise CampError(
            f"rollout_id={repeated[0]}: several episodes have it; stores that were joined need "
            "new ids, or their denominators would be mixed"
        )
    aborted = [e.rollout_id for e in episodes if e.status in ("aborted", "failed")]
    if aborted:
        raise CampError(
            f"episode {aborted[0]}: was not finished (status aborted or failed); drop it or "
            "sample it again, it says nothing about the policy"
        )


def _select(data: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """One micro-batch with slime's keys."""
    per_row = (
        "loss_masks rollout_mask_sums rollout_log_probs advantages log_probs ref_log_probs "
        "response_lengths rollout_ids"
    )
    batch: dict[str, Any] = {
        key: None if data.get(key) is None else [data[key][i] for i in rows]
        for key in per_row.split()
    }
    batch["unconcat_tokens"] = [data["tokens"][i] for i in rows]
    batch["tokens"] = torch.cat(batch["unconcat_tokens"])[None]
    batch["total_lengths"] = [tokens.numel() for tokens in batch["unconcat_tokens"]]
    return batch
