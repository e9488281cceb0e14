"""Client of SGLang's `/generate`: the embedded engine and a real server speak it alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from harness_bridges.engine import Generation
from harness_bridges.errors import CampError, RecordError
from harness_bridges.record import FloatArray, IntArray

RETRIES = 5
_FIRST_DELAY_S = 0.2


class EngineError(CampError):
    """The engine refused a request or could not be reached."""


class SGLangClient:
    """Tokens in, tokens out over HTTP.

    Use as an async context manager::

        async with SGLangClient("http://127.0.0.1:30000") as engine:
            generation = await engine.generate(ids, max_new_tokens=64, temperature=1.0, stop=())
    """

    def __init__(self, url: str, *, timeout_s: float = 1800.0) -> None:
        self.url = url.rstrip("/")
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False)

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def generate(
        self,
        prompt_ids: IntArray,
        *,
        max_new_tokens: int,
        temperature: float,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Generation:
        """Sample one response.

        Args:
            prompt_ids: int64 `[P]`.
            max_new_tokens: most tokens to sample, >= 1.
            temperature: > 0; log-probs come at this temperature.
            stop: strings that end the response; their tokens stay in the output.
            seed: of the sampler, if the engine honours `sampling_seed`.

        Raises:
            RecordError: the response breaks an invariant, e.g. ids and log-probs that differ in
                number; it is refused, not repaired.
            EngineError: the engine refused the request, or retries ran out.
        """
        params: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "stop": list(stop),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if seed is not None:
            params["sampling_seed"] = seed
        payload = {
            "input_ids": prompt_ids.tolist(),
            "sampling_params": params,
            "return_logprob": True,
        }
        return parse_generation(await self._post(payload))

    async def score(self, ids: IntArray, start: int) -> FloatArray:
        """Log-probs of given tokens at temperature 1.

        Args:
            ids: int64 `[L]`, the whole sequence.
            start: first token to score, >= 1: a token needs one before it.

        Returns:
            float64 `[L - start]`.
        """
        if not 1 <= start <= ids.size:
            raise RecordError(f"start={start}: expected 1 <= start <= {ids.size}")
        payload = {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        entries = (await self._post(payload))["meta_info"]["input_token_logprobs"][1:]
        returned = np.array([entry[1] for entry in entries], dtype=np.int64)
        if not np.array_equal(returned, ids[start:]):
            raise RecordError(
                f"input_token_logprobs: the engine scored {returned.size} other tokens than the "
                f"{ids.size - start} that were sent"
            )
        return np.array([entry[0] for entry in entries], dtype=np.float64)

    async def _post(self, payload: Mapping[str, Any]) -> Any:
        delay = _FIRST_DELAY_S
        for attempt in range(1, RETRIES + 1):
            try:
                response = await self._http.post(f"{self.url}/generate", json=payload)
                if response.status_code < 500:
                    break
                problem = f"HTTP {response.status_code}: {response.text[:200]}"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt == RETRIES:
                raise EngineError(f"{self.url}/generate failed {RETRIES} times; last: {problem}")
            await asyncio.sleep(delay)
            delay *= 2
        if response.status_code >= 400:
            raise EngineError(f"{self.url}/generate refused: {response.text[:500]}")
        return response.json()


def parse_generation(response: Mapping[str, Any]) -> Generation:
    """A `/generate` response as a `Generation`.

    Raises:
        RecordError: `output_token_logprobs` is missing, or its length differs from
            `completion_tokens`.
    """
    meta = response.get("meta_info", {})
    entries = meta.get("output_token_logprobs")
    if entries is None:
        raise RecordError(
            "meta_info.output_token_logprobs: is missing; the engine must support return_logprob"
        )
    count = meta.get("completion_tokens", len(entries))
    if count != len(entries):
        raise RecordError(
            f"len(output_token_logprobs)={len(entries)}, completion_tokens={count}: the engine "
            "lost tokens; update it, a record with holes cannot be trained on"
        )
    reason = meta.get("finish_reason") or {}
    return Generation(
        output_ids=np.array([entry[1] for entry in entries], dtype=np.int64),
        output_logprobs=np.array([entry[0] for entry in entries], dtype=np.float64),
        finish_reason=reason.get("type", "stop") if isinstance(reason, dict) else str(reason),
        weight_version=str(meta.get("weight_version", "default")),
    )
