"""Checkpoints of the embedded host: whole or not there, and an exact resume."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from harness_bridges.errors import CampError

_OURS = re.compile(r"step_\d{6}|\.writing_\d+")


def save_checkpoint(root: Path, *, model: Any, optimizer: Any, state: dict[str, Any]) -> Path:
    """Write weights (a Hugging Face directory), optimizer and counters under `root/step_N`.

    The directory appears under its name only when it is complete; the one before it is removed
    after that.

    Args:
        root: checkpoint root.
        model, optimizer: as in the trainer.
        state: JSON values; `rollout_id` is the next rollout step to run.
    """
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"step_{state['rollout_id']:06d}"
    scratch = root / f".writing_{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    model.save_pretrained(scratch)
    torch.save(optimizer.state_dict(), scratch / "optimizer.pt")
    (scratch / "state.json").write_text(json.dumps(state))
    for path in scratch.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)
    os.replace(scratch, target)
    for old in root.iterdir():
        if old != target and _OURS.fullmatch(old.name):
            shutil.rmtree(old)
    return target


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    found = sorted(name for name in names if name.startswith("step_") and _OURS.fullmatch(name))
    return root / found[-1] if found else None


def load_checkpoint(path: Path, *, model: Any, optimizer: Any) -> dict[str, Any]:
    """Restore weights and optimizer in place; returns the saved state.

    Raises:
        CampError: the checkpoint is of another model.
    """
    from safetensors.torch import load_model

    try:
        load_model(model, path / "model.safetensors")
    except (RuntimeError, FileNotFoundError) as error:
        raise CampError(
            f"{path}: does not fit hf_checkpoint: {error}; use another `save`"
        ) from None
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    return state
