"""Validation of `/generate` bodies: the subset of SGLang's wire format that the engine speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from camp_plugin.local.decoder import SamplingParams
from harness_bridges.errors import CampError
from harness_bridges.record import IntArray

IGNORED_PARAMS = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"}
"""SGLang parameters that change nothing here: output is token ids, one sample a request."""

_TYPES: dict[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "stop": (str, list, tuple, type(None)),
    "stop_token_ids": (list, tuple, type(None)),
    "ignore_eos": (bool,),
    "sampling_seed": (int, type(None)),
}


def parse_request(body: Any) -> tuple[IntArray, SamplingParams, int | None]:
    """Prompt ids, sampling parameters and, for scoring, the first position.

    Raises:
        CampError: names the field, the value and the remedy.
    """
    if not isinstance(body, Mapping):
        raise CampError(f"the request body is a {type(body).__name__}, expected a JSON object")
    if body.get("stream"):
        raise CampError("stream: is not supported by this engine; send the request without it")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise CampError(
            "input_ids: expected a non-empty flat list of token ids; text and batches "
            "are not supported, tokenise first and send one request each"
        )
    params = _parse_params(body.get("sampling_params") or {})
    start = body.get("logprob_start_len", -1)
    if type(start) is not int:
        raise CampError(f"logprob_start_len={start!r}: expected an integer")
    if params.max_new_tokens == 0 and start < 0:
        raise CampError("logprob_start_len: set it to score a prompt (max_new_tokens is 0)")
    if start >= len(ids):
        raise CampError(f"logprob_start_len={start}: the prompt has {len(ids)} tokens")
    return np.array(ids, dtype=np.int64), params, start if start >= 0 else None


def _parse_params(raw: Any) -> SamplingParams:
    if not isinstance(raw, Mapping):
        raise CampError(f"sampling_params: expected an object, got {type(raw).__name__}")
    unknown = sorted(set(raw) - set(_TYPES) - IGNORED_PARAMS)
    if unknown:
        raise CampError(
            f"sampling_params: {', '.join(unknown)} not supported by this engine; "
            f"it knows {', '.join(sorted(_TYPES))}"
        )
    known: dict[str, Any] = {name: raw[name] for name in _TYPES if name in raw}
    for name, value in known.items():
        wrong_bool = isinstance(value, bool) and bool not in _TYPES[name]
        if wrong_bool or not isinstance(value, _TYPES[name]):
            raise CampError(f"{name}={value!r}: expected {_TYPES[name][0].__name__}")
    stop = known.get("stop") or ()
    known["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    known["stop_token_ids"] = frozenset(known.get("stop_token_ids") or ())
    if not all(isinstance(text, str) and text for text in known["stop"]):
        raise CampError(f"stop={stop!r}: expected non-empty strings")
    if not all(type(i) is int for i in known["stop_token_ids"]):
        raise CampError(f"stop_token_ids={raw['stop_token_ids']!r}: expected token ids")
    params = SamplingParams(**known)
    _check_params(params)
    return params


def _check_params(params: SamplingParams) -> None:
    if params.max_new_tokens < 0:
        raise CampError(f"max_new_tokens={params.max_new_tokens}: expected an integer >= 0")
    if not 0 < params.temperature < float("inf"):
        raise CampError(
            f"temperature={params.temperature}: must be above 0; for greedy decoding set top_k: 1"
        )
    if not 0 < params.top_p <= 1:
        raise CampError(f"top_p={params.top_p}: expected 0 < top_p <= 1")
    if params.sampling_seed is not None and not 0 <= params.sampling_seed < 2**63:
        raise CampError(f"sampling_seed={params.sampling_seed}: expected 0 <= seed < 2**63")


def check_fits(ids: IntArray, params: SamplingParams, config: Any) -> None:
    """Refuse what the model cannot take: foreign token ids, more than its context."""
    if int(ids.max()) >= config.vocab_size:
        raise CampError(
            f"input_ids: token id {int(ids.max())} is not in the model's vocabulary of "
            f"{config.vocab_size}; tokenise with the model's own tokenizer"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and ids.size + params.max_new_tokens > longest:
        raise CampError(
            f"input_ids: {ids.size} tokens and max_new_tokens={params.max_new_tokens} exceed the "
            f"model's context of {longest}"
        )
