"""Run episodes: harness, environment and engine together, many at a time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness_bridges.conversation import Conversation
from harness_bridges.engine import (
    ChatTokenizer,
    Engine,
    Generation,
    RunIds,
    RunLimits,
    Session,
)
from harness_bridges.errors import CampError
from harness_bridges.harness import Harness
from harness_bridges.record import Episode, IntArray
from rollout_adapters.environments.registry import Environment, Task
from rollout_adapters.sandbox.sandbox import Sandbox
from rollout_adapters.sglang import SGLangClient

Policy = Callable[[Engine, SGLangClient, Session, dict[str, Any]], Engine]
"""Stands between a harness and the model for one episode; what it puts into the dict ends up in
the episode's metadata."""


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to run."""

    task: Task
    rollout_id: int
    group_id: int


def plan_jobs(tasks: Sequence[Task], step: int, batch_size: int, group_size: int) -> list[Job]:
    """The episodes of one rollout step: `batch_size` tasks in order, `group_size` times each.

    Task order and ids depend on `step` alone, so a resumed run goes on where it stopped.
    """
    jobs = []
    for prompt in range(step * batch_size, (step + 1) * batch_size):
        task = tasks[prompt % len(tasks)]
        first = prompt * group_size
        jobs += [Job(task, first + i, prompt) for i in range(group_size)]
    return jobs


class _SeededEngine:
    """Gives every model call of an episode a seed of its own, from the run's seed."""

    def __init__(self, client: SGLangClient, seed: int, rollout_id: int) -> None:
        self._client, self._base, self._calls = client, f"{seed}/{rollout_id}", 0

    async def generate(
        self, prompt_ids: IntArray, *, max_new_tokens: int, temperature: float, stop: Sequence[str]
    ) -> Generation:
        digest = hashlib.sha256(f"{self._base}/{self._calls}".encode()).digest()
        self._calls += 1
        return await self._client.generate(
            prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop=stop,
            seed=int.from_bytes(digest[:4], "big"),
        )


async def run_episode(
    job: Job,
    *,
    client: SGLangClient,
    chat: ChatTokenizer,
    environment: Environment,
    harness: Harness,
    limits: RunLimits,
    seed: int,
    sandbox: Sandbox | None = None,
    policy: Policy | None = None,
) -> Episode:
    """One finished, graded episode; a harness that runs commands needs the sandbox."""
    session = environment.start(job.task)
    metadata: dict[str, Any] = {"temperature": limits.temperature}
    ids = RunIds(
        rollout_id=job.rollout_id,
        group_id=job.group_id,
        session_id=f"{seed}-{job.rollout_id}",
        task_id=job.task.task_id,
        metadata=metadata,
    )
    engine: Engine = _SeededEngine(client, seed, job.rollout_id)
    if policy is not None:
        engine = policy(engine, client, session, metadata)
    conversation = Conversation(
        engine, chat, session, limits, ids, sandbox.open if sandbox else None
    )
    try:
        await harness.run(conversation)
    except CampError:
        raise
    except Exception as error:
        where = f"episode {job.rollout_id} (task {job.task.task_id!r})"
        raise CampError(
            f"{where}: {type(error).__name__}: {error}; "
            "finished episodes are stored, the same command goes on with the others"
        ) from error
    finally:
        await conversation.close()
    return conversation.episode()


async def run_episodes(
    jobs: Sequence[Job], *, concurrency: int = 16, **context: Any
) -> AsyncIterator[Episode]:
    """Yield episodes as they finish; `context` is what `run_episode` takes."""
    slots = asyncio.Semaphore(concurrency)

    async def run(job: Job) -> Episode:
        async with slots:
            return await run_episode(job, **context)

    running = [asyncio.create_task(run(job)) for job in jobs]
    try:
        for finished in asyncio.as_completed(running):
            yield await finished
    finally:
        for task in running:
            task.cancel()


def limits_from_args(args: Any) -> RunLimits:
    """The episode budgets, by slime's flag names."""
    return RunLimits(
        max_turns=args.camp_max_turns,
        max_new_tokens=args.rollout_max_response_len,
        max_context=args.rollout_max_context_len,
        temperature=args.rollout_temperature,
    )
