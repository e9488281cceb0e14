"""slime's rollout-data-postprocess hook: take the records out of their carrier."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from harness_bridges.errors import CampError
from loss_hooks.host import stash_records

CARRIER = "prompt"
"""slime copies this key of the train data to every rank and never reads it."""


def rollout_data_postprocess(
    args: Any, rollout_id: int, rollout_data: MutableMapping[str, Any]
) -> None:
    """Pop the carrier and bind each record to its row's token tensor.

    Args:
        args: the host's arguments.
        rollout_id: the host's rollout step.
        rollout_data: per-row lists; `tokens` are tensors, `step_ids` name the optimizer step.

    Raises:
        CampError: the carrier is missing or has another length than the rows.
    """
    del args
    carried = rollout_data.pop(CARRIER, None)
    tokens = rollout_data["tokens"]
    if carried is None or len(carried) != len(tokens):
        found = "no records" if carried is None else f"{len(carried)} records"
        raise CampError(
            f"rollout {rollout_id}: {found} for {len(tokens)} rows; set the "
            "convert-samples-to-train-data hook, it packs the records"
        )
    records = [json.loads(text) if text else None for text in carried]
    stash_records(tokens, records, rollout_data["step_ids"])
