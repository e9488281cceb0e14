"""The embedded host: slime's micro-batch contract on a transformers model, in one process.

Rows of a micro-batch are packed into one sequence without padding and run through tree
attention: separate rows are a forest of single nodes, a `packed_mask` row brings its trie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from camp_plugin.local.forward import check_tree_attention, hidden_states, pack_rows, predictors
from harness_bridges.errors import CampError
from loss_hooks.host import Batch, HookResult
from loss_hooks.policy_loss import PolicyLossConfig, Reduce, policy_terms, reduce_policy_terms
from loss_hooks.prefix_tree import PrefixTree
from loss_hooks.token_stats import Leaves, TeacherRows, TokenStats, token_stats
from loss_hooks.tree_attention import make_layout


def make_reducer(batch: Batch) -> Reduce:
    """slime's `sum_of_sample_mean`: one token mean per rollout, summed over the micro-batch.

    Values under a zero mask are replaced, not multiplied: NaN times 0 is NaN.
    """
    masks = torch.cat(list(batch["loss_masks"]))
    sums = torch.stack(list(batch["rollout_mask_sums"])).clamp_min(1).double()
    weights = masks / torch.repeat_interleave(sums, torch.tensor(batch["response_lengths"]))

    def reduce(values: Tensor) -> Tensor:
        kept = torch.where(masks > 0, values, torch.zeros_like(values))
        return (kept * weights.to(values.dtype)).sum()

    return reduce


class Drift:
    """Train-inference drift (002, Eq. 1): |train - rollout log-prob| over loss tokens."""

    def __init__(self) -> None:
        self.enabled = False
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self._sum, self._max, self._count = 0.0, 0.0, 0

    def add(self, log_probs: Tensor, batch: Batch) -> None:
        """Response-aligned log-probs of a micro-batch; masked slots do not count."""
        masks = torch.cat(list(batch["loss_masks"])) > 0
        self.add_tokens(log_probs[masks], torch.cat(list(batch["rollout_log_probs"]))[masks])

    def add_tokens(self, log_probs: Tensor, rollout_log_probs: Tensor) -> None:
        """Both `[M]`, loss tokens only."""
        if not self.enabled or not log_probs.numel():
            return
        drift = (log_probs.detach().double() - rollout_log_probs.double()).abs()
        self._sum += float(drift.sum())
        self._max = max(self._max, float(drift.max()))
        self._count += drift.numel()

    def metrics(self) -> dict[str, float]:
        """`camp/logdiff_mean` and `camp/logdiff_max` in nats; NaN if nothing was measured."""
        mean = self._sum / self._count if self._count else math.nan
        return {
            "camp/logdiff_mean": mean,
            "camp/logdiff_max": self._max if self._count else math.nan,
        }


class LocalHost:
    """`loss_hooks.host.Host` for transformers models."""

    def __init__(self, model: Any) -> None:
        scaled = ("final_logit_softcapping", "logits_scaling", "logit_scale")
        for name in scaled:
            if getattr(model.config, name, None) not in (None, 1.0):
                raise CampError(
                    f"{model.config.model_type}: {name} rescales the logits after the output "
                    "projection; this host reads plain logits only"
                )
        self.model = model
        self.drift = Drift()
        check_tree_attention(model)

    def logits(self, batch: Batch) -> Tensor:
        """`[1, T, V]`: the micro-batch's packed forward."""
        tokens, positions, layout = pack_rows(batch["unconcat_tokens"])
        hidden = hidden_states(self.model, tokens, positions, layout)
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits[None]

    def row_offsets(self, batch: Batch) -> list[int]:
        """Where each row starts in the packed logits."""
        lengths = [tokens.numel() for tokens in batch["unconcat_tokens"]]
        return [sum(lengths[:i]) for i in range(len(lengths))]

    def response_index(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logit rows and token ids `[sum of R_i]` of all response tokens."""
        rows, targets = [], []
        for tokens, size, start in zip(
            batch["unconcat_tokens"],
            batch["response_lengths"],
            self.row_offsets(batch),
            strict=True,
        ):
            rows.append(predictors(tokens)[-size:] + start)
            targets.append(tokens[-size:])
        return torch.cat(rows), torch.cat(targets)

    def log_probs(self, args: Any, batch: Batch, logits: Tensor) -> list[Tensor]:
        """Log-probs `[R_i]` of every response token, per row."""
        rows, targets = self.response_index(batch)
        stats = token_stats(logits[0], rows, targets, temperature=args.rollout_temperature)
        return list(torch.split(stats.log_probs, list(batch["response_lengths"])))

    def policy_loss(
        self, args: Any, batch: Batch, logits: Tensor, reduce: Reduce, leaves: Leaves | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The policy loss of all rows, its metrics, and the KL `[D]` of the leaves."""
        rows, targets = self.response_index(batch)
        stats = token_stats(
            logits[0], rows, targets, leaves=leaves, temperature=args.rollout_temperature
        )
        self.drift.add(stats.log_probs, batch)
        mask = torch.cat(list(batch["loss_masks"])) > 0
        old = _old_log_probs(args, batch)
        rollout = torch.cat(list(batch["rollout_log_probs"]))
        loss, metrics = _loss(args, batch, stats, mask, old, rollout, lambda x: x, reduce)
        return loss, metrics, stats.leaf_kl

    def packed_policy_loss(
        self,
        args: Any,
        batch: Batch,
        logits: Tensor,
        reduce: Reduce,
        records: Sequence[Mapping[str, Any]],
    ) -> HookResult:
        """The policy loss on listed targets; each lands in its token's response slot."""
        slots = self._target_slots(batch, records)
        rows, tokens = self.response_index(batch)
        stats = token_stats(
            logits[0], rows[slots], tokens[slots], temperature=args.rollout_temperature
        )
        flat = [lp for record in records for lp in record["rollout_log_probs"]]
        sampled = torch.tensor(flat, dtype=torch.float64)
        self.drift.add_tokens(stats.log_probs, sampled)
        old = _old_log_probs(args, batch)
        if old is not None:
            old = sampled if args.use_rollout_logprobs else old[slots]
        counts = torch.bincount(slots, minlength=rows.numel()).clamp_min(1)

        def scatter_reduce(values: Tensor) -> Tensor:
            # The reducer multiplies a slot by its number of targets; their sum is wanted.
            sums = torch.zeros(rows.numel(), dtype=values.dtype).index_add(0, slots, values)
            return reduce(sums / counts)

        mask = torch.ones(slots.numel(), dtype=torch.bool)
        return _loss(args, batch, stats, mask, old, sampled, lambda x: x[slots], scatter_reduce)

    def _target_slots(self, batch: Batch, records: Sequence[Mapping[str, Any]]) -> Tensor:
        """int64 `[M]`: index of every listed target among all response tokens."""
        slots, start = [], 0
        lengths = zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True)
        for record, (tokens, size) in zip(records, lengths, strict=True):
            prompt = tokens.numel() - size
            slots.append(torch.tensor(record["targets"], dtype=torch.int64) - prompt + start)
            start += size
        return torch.cat(slots)

    @torch.no_grad()
    def teacher_rows(self, model: Any, tree: PrefixTree, rows: Tensor) -> TeacherRows:
        """Hidden states of a packed trie at `rows`, with the weights as they are now."""
        head = model.get_output_embeddings()
        layout = make_layout(tree.nodes, tree.positions)
        tokens, positions = torch.from_numpy(tree.tokens), torch.from_numpy(tree.positions)
        hidden = hidden_states(model, tokens, positions, layout)[rows].clone()
        bias = None if head.bias is None else head.bias.detach()
        return TeacherRows(hidden, head.weight.detach(), bias)


def _old_log_probs(args: Any, batch: Batch) -> Tensor | None:
    """The ratio's denominator per response token; None: the current policy itself."""
    lists = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    return None if lists is None else torch.cat(list(lists))


def _loss(
    args: Any,
    batch: Batch,
    stats: TokenStats,
    mask: Tensor,
    old: Tensor | None,
    rollout: Tensor,
    pick: Callable[[Tensor], Tensor],
    reduce: Reduce,
) -> HookResult:
    config = PolicyLossConfig.from_args(args)
    ref = batch["ref_log_probs"]
    terms = policy_terms(
        config,
        log_probs=stats.log_probs,
        old_log_probs=stats.log_probs.detach() if old is None else old,
        advantages=pick(torch.cat(list(batch["advantages"]))),
        mask=mask,
        ref_log_probs=None if ref is None else pick(torch.cat(list(ref))),
        rollout_log_probs=rollout,
    )
    return reduce_policy_terms(config, terms, stats.entropy, reduce)
