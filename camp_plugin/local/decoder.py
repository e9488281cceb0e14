"""Batched sampling on a transformers model: KV cache, prefix reuse, exact log-probs.

Sequences join and leave the batch at every step. Prefill runs one sequence at a time, from the
longest cached prefix on; decoding runs all of them together, left-padded. Not thread-safe: one
worker owns a decoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from harness_bridges.align import common_prefix
from harness_bridges.errors import CampError
from harness_bridges.record import IntArray

KV = list[tuple[Tensor, Tensor]]
"""Per layer, keys and values `[1, heads, length, dim]` of one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The subset of SGLang's sampling parameters that the embedded engine honours."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One request while it is decoded."""

    prompt: IntArray
    params: SamplingParams
    generator: torch.Generator
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    matched: str | int | None = None
    cached_tokens: int = 0
    aborted: bool = False


class PrefixCache:
    """Least-recently-used KV of whole sequences, found by longest common prefix."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._entries: OrderedDict[bytes, tuple[IntArray, KV]] = OrderedDict()

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()

    def put(self, ids: IntArray, kv: KV) -> None:
        """Keep a sequence's KV; the least recently used ones make room."""
        self._entries[ids.tobytes()] = (ids, kv)
        self._entries.move_to_end(ids.tobytes())
        while sum(entry[0].size for entry in self._entries.values()) > self.max_tokens:
            self._entries.popitem(last=False)

    def longest(self, ids: IntArray) -> tuple[int, KV]:
        """Length and KV of the longest cached prefix; at least one token is left to compute."""
        best, found = 0, b""
        for key, (cached, _) in self._entries.items():
            shared = min(common_prefix(cached, ids), ids.size - 1)
            if shared > best:
                best, found = shared, key
        if not best:
            return 0, []
        self._entries.move_to_end(found)
        return best, [(k[:, :, :best], v[:, :, :best]) for k, v in self._entries[found][1]]


class Decoder:
    """Decodes a changing batch of sequences with one model."""

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: frozenset[int],
        decode_text: Callable[[Sequence[int]], str],
        cache_tokens: int = 65536,
    ) -> None:
        self.model = model
        self.eos_ids = eos_ids
        self.decode_text = decode_text
        self.prefixes = PrefixCache(cache_tokens)
        self.active: list[Request] = []
        self._kv: KV = []
        self._lengths: list[int] = []
        self._check_cache()

    @torch.inference_mode()
    def _check_cache(self) -> None:
        """Compare a prefill and one cached step with a plain forward.

        Raises:
            CampError: they differ: the model ignores the cache that it is given.
        """
        ids = torch.tensor([[1, 2, 3, 4]])
        cache = DynamicCache()
        self.model(input_ids=ids[:, :3], cache=cache, use_cache=True)
        step = self.model(
            input_ids=ids[:, 3:],
            position_ids=torch.tensor([[3]]),
            cache=cache,
            use_cache=True,
        )
        plain = self.model(input_ids=ids, use_cache=False).logits[0, -1]
        error = float((step.logits[0, -1] - plain).abs().max() / plain.abs().max())
        if not error < 1e-3:
            raise CampError(
                f"{self.model.config.model_type}: decoding with a KV cache differs from a plain "
                f"forward by {error:.1e}; this engine supports dense attention models, with "
                "transformers 5.24 or later"
            )

    @torch.inference_mode()
    def admit(self, sequence: Request) -> None:
        """Prefill a sequence, sample its first token and add it to the batch."""
        logits, kv = self._prefill(sequence)
        self.prefixes.put(sequence.prompt, kv)
        self._accept(sequence, logits)
        if not sequence.finish_reason:
            self._join(sequence, kv)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One more token for every active sequence; returns those that finished."""
        ids = torch.tensor([[s.output[-1]] for s in self.active])
        longest = max(self._lengths)
        lengths = torch.tensor(self._lengths)
        mask = torch.arange(longest + 1) >= (longest - lengths).unsqueeze(-1)
        cache = _to_cache(self._kv)
        out = self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=lengths.unsqueeze(-1),
            cache=cache,
            use_cache=True,
        )
        self._kv = [(layer.keys, layer.values) for layer in cache.layers]
        self._lengths = [length + 1 for length in self._lengths]
        for sequence, logits in zip(self.active, out.logits[:, -1], strict=True):
            self._accept(sequence, logits)
        return self._remove_finished()

    @torch.inference_mode()
    def score(self, ids: IntArray, start: int) -> list[float]:
        """Natural log-probs of `ids[start + 1:]` at temperature 1."""
        tokens = torch.from_numpy(np.array(ids))
        if ids.size == start + 1:
            return []
        reused, kv = self.prefixes.longest(ids[: start + 1])
        out = self.model(
            input_ids=tokens[None, reused:-1],
            position_ids=torch.arange(reused, ids.size - 1)[None],
            cache=_to_cache(kv),
            use_cache=True,
            logits_to_keep=ids.size - 1 - start,
        )
        logits = out.logits[0].float()
        log_probs = torch.log_softmax(logits, -1).gather(-1, tokens[start + 1 :, None])
        return [float(x) for x in log_probs.squeeze(-1)]

    def reset(self) -> None:
        """Forget the batch and all cached prefixes, after a failure."""
        self.active, self._kv, self._lengths = [], [], []
        self.prefixes.clear()

    def _prefill(self, sequence: Request) -> tuple[Tensor, KV]:
        reused, kv = self.prefixes.longest(sequence.prompt)
        sequence.cached_tokens = reused
        cache = _to_cache(kv)
        ids = torch.from_numpy(np.array(sequence.prompt[reused:]))[None]
        out = self.model(
            input_ids=ids,
            position_ids=torch.arange(reused, sequence.prompt.size)[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[0, -1], [(layer.keys, layer.values) for layer in cache.layers]

    def _accept(self, sequence: Request, logits: Tensor) -> None:
        params = sequence.params
        log_probs = torch.log_softmax(logits.float() / params.temperature, -1)
        token = _sample(log_probs, params, sequence.generator)
        sequence.output.append(token)
        sequence.log_probs.append(float(log_probs[token]))
        self._check_finished(sequence)

    def _check_finished(self, sequence: Request) -> None:
        params, token = sequence.params, sequence.output[-1]
        if sequence.aborted:
            sequence.finish_reason = "abort"
        elif token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
            sequence.finish_reason, sequence.matched = "stop", token
        elif params.stop and (hit := self._stop_string(sequence)):
            sequence.finish_reason, sequence.matched = "stop", hit
        elif len(sequence.output) >= params.max_new_tokens:
            sequence.finish_reason = "length"

    def _stop_string(self, sequence: Request) -> str:
        longest = max(len(text.encode()) for text in sequence.params.stop)
        # A token holds at least one byte, so a stop string spans at most that many tokens.
        tail = self.decode_text(sequence.output[-longest - 1 :])
        return next((text for text in sequence.params.stop if text in tail), "")

    def _join(self, sequence: Request, kv: KV) -> None:
        lengths = [*self._lengths, sequence.prompt.size]
        new = [_pad_left(layer, max(lengths)) for layer in kv]
        old = [_pad_left(layer, max(lengths)) for layer in self._kv]
        self._kv = [_stack(a, b) for a, b in zip(old, new, strict=True)] if old else new
        self.active.append(sequence)
        self._lengths = lengths

    def _remove_finished(self) -> list[Request]:
        done = [i for i, s in enumerate(self.active) if s.finish_reason]
        if not done:
            return []
        finished = [self.active[i] for i in done]
        for i in done:
            self._keep_prefix(i)
        keep = [i for i in range(len(self.active)) if i not in done]
        self.active = [self.active[i] for i in keep]
        self._lengths = [self._lengths[i] for i in keep]
        longest = max(self._lengths, default=0)
        self._kv = [(k[keep, :, -longest:], v[keep, :, -longest:]) for k, v in self._kv]
        if not keep:
            self._kv = []
        return finished

    def _keep_prefix(self, index: int) -> None:
        """Cache a finished sequence: its next turn most likely extends it."""
        sequence, length = self.active[index], self._lengths[index]
        ids = np.concatenate([sequence.prompt, np.array(sequence.output[:-1], dtype=np.int64)])
        kv = [
            (k[index : index + 1, :, -length:].clone(), v[index : index + 1, :, -length:].clone())
            for k, v in self._kv
        ]
        self.prefixes.put(ids, kv)


def _to_cache(kv: KV) -> Any:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys, values, layer)
    return cache


def _pad_left(layer: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
    missing = length - layer[0].shape[2]
    keys, values = (torch.nn.functional.pad(x, (0, 0, missing, 0)) for x in layer)
    return keys, values


def _stack(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])


def _sample(log_probs: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Draw a token; top-k and top-p cut the draw, not the reported log-probs."""
    if params.top_k == 1:
        return int(log_probs.argmax())
    probs = log_probs.exp()
    if params.top_k > 0 or params.top_p < 1.0:
        ranked, order = probs.sort(descending=True)
        above = ranked.cumsum(-1) - ranked  # mass of all likelier tokens
        cut = above >= params.top_p
        if params.top_k > 0:
            cut[params.top_k :] = True
        probs = torch.zeros_like(probs).scatter(-1, order, ranked.masked_fill(cut, 0.0))
    return int(torch.multinomial(probs, 1, generator=generator))
