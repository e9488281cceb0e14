"""The embedded engine: SGLang's `/generate` wire format on a transformers model.

A worker thread owns the decoder; HTTP handlers hand it requests and wait. A client that
disconnects aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from camp_plugin.local.decoder import Decoder, Request, SamplingParams
from camp_plugin.local.requests import check_fits, parse_request
from harness_bridges.errors import CampError
from harness_bridges.record import IntArray


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way to the worker."""

    ids: IntArray
    params: SamplingParams
    start: int | None
    future: Future[dict[str, Any]]
    request: Request | None = None
    aborted: bool = False


class LocalEngine:
    """Samples and scores with one model; `weight_version` names its current weights."""

    def __init__(self, decoder: Decoder, *, max_batch: int = 16, seed: int = 0) -> None:
        self.decoder = decoder
        self.max_batch = max_batch
        self.weight_version = "0"
        self._seed, self._count = seed, 0
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._running: list[_Job] = []
        self._open, self._closed = 0, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def update_weights(self, version: str) -> None:
        """Announce that the model's weights changed: cached prefixes are dropped.

        Raises:
            CampError: requests are still waiting or running.
        """
        with self._lock:
            if self._open:
                raise CampError(f"update_weights: {self._open} requests are open; drain them first")
            self.decoder.prefixes.clear()
            self.weight_version = version

    def close(self) -> None:
        """Stop the worker and free its caches; requests that are still open fail."""
        with self._lock:
            self._closed = True
        self._jobs.put(None)
        self._thread.join()
        self.decoder.reset()

    def submit(self, body: Mapping[str, Any]) -> _Job:
        """Validate a `/generate` body and queue it.

        Raises:
            CampError: a field is missing, malformed or not supported, or the engine is closed.
        """
        ids, params, start = parse_request(body)
        check_fits(ids, params, self.decoder.model.config)
        job = _Job(ids, params, start, Future())
        with self._lock:
            if self._closed:
                raise CampError("the engine is closed")
            self._open += 1
            self._jobs.put(job)
        return job

    def _work(self) -> None:
        while self._admit_waiting():
            if self.decoder.active:
                self._step()
        waiting = [job for job in list(self._jobs.queue) if job is not None]
        for job in [*self._running, *waiting]:
            self._settle(job, error=CampError("the engine was closed before it answered"))

    def _admit_waiting(self) -> bool:
        """Take what waits, or wait if there is nothing to do. False: time to stop."""
        while len(self.decoder.active) < self.max_batch:
            try:
                job = self._jobs.get(block=not self.decoder.active)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._start(job)
        return True

    def _start(self, job: _Job) -> None:
        """Prefill one request; what goes wrong there concerns it alone."""
        try:
            if job.params.max_new_tokens == 0 or job.aborted:
                self._settle(job, response=self._response(job, None))
                return
            seed = job.params.sampling_seed
            generator = torch.Generator()
            generator.manual_seed((self._seed << 32) + self._count if seed is None else seed)
            self._count += 1
            job.request = Request(job.ids, job.params, generator)
            self.decoder.admit(job.request)
            if job.request.finish_reason:
                self._settle(job, response=self._response(job, job.request))
            else:
                self._running.append(job)
        except Exception as error:
            self._settle(job, error=error)

    def _step(self) -> None:
        for job in self._running:
            if job.aborted and job.request is not None:
                job.request.aborted = True
        try:
            finished = self.decoder.step()
        except Exception as error:  # the whole batch failed; the worker goes on
            failed, self._running = self._running, []
            self.decoder.reset()
            for job in failed:
                self._settle(job, error=error)
            return
        for job in [j for j in self._running if j.request in finished]:
            self._running.remove(job)
            self._settle(job, response=self._response(job, job.request))

    def _settle(
        self, job: _Job, *, response: dict[str, Any] | None = None, error: Exception | None = None
    ) -> None:
        with self._lock:
            self._open -= 1
        # A client that went away cancelled its future: there is nobody to tell.
        if job.future.set_running_or_notify_cancel():
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(response or {})

    def _response(self, job: _Job, request: Request | None) -> dict[str, Any]:
        output = [] if request is None else request.output
        logged = [] if request is None else request.log_probs
        reason: dict[str, Any] = {"type": "abort" if job.aborted else "length"}
        if request is not None:
            reason = {"type": request.finish_reason}
            if request.matched is not None:
                reason["matched"] = request.matched
        meta = {
            "finish_reason": reason,
            "prompt_tokens": int(job.ids.size),
            "completion_tokens": len(output),
            "cached_tokens": 0 if request is None else request.cached_tokens,
            "weight_version": self.weight_version,
            "output_token_logprobs": [[lp, t, None] for lp, t in zip(logged, output, strict=True)],
        }
        if job.start is not None and not job.aborted:
            scored = [None, *self.decoder.score(job.ids, job.start)]
            rest = job.ids[job.start :].tolist()
            meta["input_token_logprobs"] = [[s, t, None] for s, t in zip(scored, rest, strict=True)]
        return {"text": self.decoder.decode_text(output), "output_ids": output, "meta_info": meta}


def make_app(engine: LocalEngine) -> Starlette:
    """The HTTP face: `/generate`, `/health`, `/get_model_info`, `/get_weight_version`."""

    async def generate(request: HttpRequest) -> Response:
        try:
            job = engine.submit(await request.json())
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        try:
            async with _abort_on_disconnect(request, job):
                return JSONResponse(await asyncio.wrap_future(job.future))
        except Exception as error:  # the client decides whether to try again
            message = f"{type(error).__name__}: {error}"
            return JSONResponse({"error": {"message": message}}, status_code=500)

    async def health(request: HttpRequest) -> Response:
        return Response(status_code=200)

    async def info(request: HttpRequest) -> Response:
        path = str(engine.decoder.model.config.name_or_path)
        return JSONResponse({"model_path": path, "weight_version": engine.weight_version})

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/health", health),
            Route("/get_model_info", info),
            Route("/get_weight_version", info),
        ]
    )


@contextlib.asynccontextmanager
async def _abort_on_disconnect(request: HttpRequest, job: _Job) -> AsyncIterator[None]:
    async def watch() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.05)
        job.aborted = True

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


@contextlib.contextmanager
def serve(engine: LocalEngine, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve in a background thread; yields the URL. Port 0 takes a free one."""
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise CampError(f"engine: could not listen on {host}:{port}: {error}") from None
    server = uvicorn.Server(uvicorn.Config(make_app(engine), log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.02)
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
