"""What a hook needs of its host, and the records that travel with training rows.

The hooks are the same code in every host. A host (slime's trainer process, the embedded one)
announces itself with `use_host` before it calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from harness_bridges.errors import CampError
from loss_hooks.policy_loss import Reduce
from loss_hooks.prefix_tree import PrefixTree
from loss_hooks.token_stats import Leaves, TeacherRows

Batch = Mapping[str, Any]
"""slime's micro-batch: see the keys in `docs/hosts.md`."""
HookResult = tuple[Tensor, dict[str, Tensor]]
"""`(loss, metrics)`; metrics have the same keys, in the same order, in every micro-batch."""


class Host(Protocol):
    """The services behind a loss hook."""

    def policy_loss(
        self, args: Any, batch: Batch, logits: Tensor, reduce: Reduce, leaves: Leaves | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The host's policy loss on its rows, and the forward KL `[D]` of the leaves."""
        ...

    def packed_policy_loss(
        self,
        args: Any,
        batch: Batch,
        logits: Tensor,
        reduce: Reduce,
        records: Sequence[Mapping[str, Any]],
    ) -> HookResult:
        """The same loss on packed tries, whose targets are listed in their records."""
        ...

    def row_offsets(self, batch: Batch) -> list[int]:
        """Where each row of the micro-batch starts in the packed logits."""
        ...

    def teacher_rows(self, model: Any, tree: PrefixTree, rows: Tensor) -> TeacherRows:
        """No-grad forward of a packed trie with the current weights, kept at `rows`."""
        ...


_host: list[Host] = []


@contextmanager
def use_host(host: Host) -> Iterator[None]:
    """Make `host` the one that hooks see, until the block ends."""
    _host.append(host)
    try:
        yield
    finally:
        _host.remove(host)


def current_host() -> Host:
    """The active host.

    Raises:
        CampError: a hook was called outside a host.
    """
    if not _host:
        raise CampError(
            "a loss hook was called, but no host is active; hooks run inside a trainer "
            "(`camp-plugin train`), or in your own inside `with use_host(host):`"
        )
    return _host[-1]


class _Stashed(NamedTuple):
    tokens: Tensor  # held, so that its id cannot be used again
    record: Mapping[str, Any]
    step: int


_records: dict[int, _Stashed] = {}


def stash_records(
    tokens: Sequence[Tensor], records: Sequence[Mapping[str, Any] | None], steps: Sequence[int]
) -> None:
    """Bind records to the token tensors of a rollout's rows, dropping the last rollout's.

    slime hands the very same tensor objects to the loss (`unconcat_tokens`), so identity finds
    a row's record whatever micro-batch or rank it lands in.

    Args:
        tokens: one tensor per row.
        records: one per row; None where the method needs none.
        steps: the optimizer step, within the rollout, that trains the row.
    """
    _records.clear()
    for tensor, record, step in zip(tokens, records, steps, strict=True):
        if record is not None:
            _records[id(tensor)] = _Stashed(tensor, record, step)


def step_records(step: int) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """`(tokens, record)` of every row with a record that the optimizer step trains."""
    for stashed in _records.values():
        if stashed.step == step:
            yield stashed.tokens, stashed.record


def find_record(tokens: Tensor) -> Mapping[str, Any] | None:
    """The record stashed for this very tensor, or None."""
    entry = _records.get(id(tokens))
    return entry.record if entry is not None and entry.tokens is tokens else None


def need_record(tokens: Tensor, method: str) -> Mapping[str, Any]:
    """The record of a row that cannot be trained without one.

    Raises:
        CampError: it is missing or was made by another method.
    """
    record = find_record(tokens)
    if record is None or record["method"] != method:
        found = "none" if record is None else repr(record["method"])
        raise CampError(
            f"the {method} loss got a row of {tokens.numel()} tokens with record {found}; build "
            f"the rows with camp_method: {method} and set the rollout-data-postprocess hook"
        )
    return record
