"""Context boundaries (000, C.2): memory is written, then the active history is replaced.

The harnesses `file_memory`, `memory_tools` and `compaction` differ in the memory interface alone;
budgets and state transitions are these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from harness_bridges.chat import Message, Sampled
from harness_bridges.conversation import Conversation
from harness_bridges.errors import ConfigError
from harness_bridges.tools import Call, closing, find_call

MEMORY_BYTES = 8192
"""Most bytes of what is written at a boundary (000, C.2)."""
PROBLEM_TOKENS = 128
"""Most tokens of the error that an invalid write is answered with."""
ACTIONS_AFTER_REQUEST = 3
"""A boundary is requested while this many responses are left: write, read, continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryConfig:
    """Settings of `file_memory`, `memory_tools` and `compaction`."""

    boundary_observation_tokens: int = 4096
    """Room that is kept for the next observation; less if the context is small (000, C.2)."""
    boundary_write_tokens: int = 4096
    """Most tokens of the response at a boundary; at most `rollout_max_response_len`."""
    boundary_require_write: bool = True
    """Whether the context is replaced only after a valid write (000, D.4: not)."""

    def __post_init__(self) -> None:
        for name in ("boundary_observation_tokens", "boundary_write_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")


class Memory(Protocol):
    """One episode's memory behind one interface."""

    tools: tuple[str, ...]
    usage: str
    """Tool instructions; they stay in every context."""
    request: str
    """What the policy is told at a boundary."""
    kind: str
    """Edit kind of the replacement."""

    async def use(self, call: Call) -> str:
        """Carry out a call between boundaries; a wrong one is answered with what is wrong."""
        ...

    async def write(self, response: Sampled) -> str:
        """Carry out the response at a boundary. Returns what makes it invalid, or nothing."""
        ...

    def fresh(self, opening: Sequence[Message], response: Sampled) -> list[Message]:
        """The context after the boundary at which `response` was sampled."""
        ...


async def play(conversation: Conversation, memory: Memory, config: BoundaryConfig) -> None:
    """Play an episode whose context is replaced whenever it runs full.

    Raises:
        ConfigError: the context cannot hold the reserves.
    """
    if memory.usage:
        conversation.instruct(memory.usage)
    budget = _Budget(conversation, memory, config)
    opening = list(conversation.messages)
    while True:
        if budget.request_is_due() and not await _cross(conversation, memory, budget, opening):
            return
        response = await budget.respond(closing(memory.tools), conversation.limits.max_new_tokens)
        if response is None:
            return
        call = find_call(response.text, memory.tools)
        if call is not None:
            conversation.note_call(call.tool, response)
            text = await memory.use(call)
            conversation.observe(conversation.clip(text, budget.observation))
        elif not conversation.step(response):
            return


async def _cross(
    conversation: Conversation, memory: Memory, budget: _Budget, opening: Sequence[Message]
) -> bool:
    """Request the write until it is valid, then replace the context. False: no budget left."""
    conversation.observe(memory.request)
    while True:
        response = await budget.respond(closing(memory.tools), budget.write)
        if response is None:
            return False
        problem = await memory.write(response)
        if not problem or not budget.config.boundary_require_write:
            break
        conversation.observe(f"{conversation.clip(problem, PROBLEM_TOKENS)}\n\n{memory.request}")
    conversation.messages = memory.fresh(opening, response)
    conversation.declare_edit(memory.kind, "length")
    return True


class _Budget:
    """What must still fit into the context."""

    def __init__(self, conversation: Conversation, memory: Memory, config: BoundaryConfig) -> None:
        limits = conversation.limits
        self.conversation, self.config = conversation, config
        self.capacity = limits.max_context - limits.max_new_tokens
        """Prompt tokens at most (000, C.2: 98,304 - 32,768 = 65,536)."""
        self.write = min(config.boundary_write_tokens, limits.max_new_tokens)
        messages = conversation.messages
        opening = conversation.prompt_length(messages)
        request = [Message("assistant", (" ",)), Message("user", (memory.request,))]
        framing = conversation.prompt_length([*messages, *request]) - opening
        # The write and one retry of it, each with its request; the retry's names the problem.
        boundary = 2 * (framing + self.write) + PROBLEM_TOKENS
        reserve = limits.max_new_tokens + boundary
        # A fresh context is the opening and a line of ours, or one written memory.
        headroom = self.capacity - opening - framing - self.write - reserve
        if headroom < 2:
            raise ConfigError(
                f"rollout_max_context_len={limits.max_context}: a fresh context of {opening} "
                f"tokens and the reserves of a boundary need at least "
                f"{limits.max_context - headroom + 2}; raise it, or lower "
                f"rollout_max_response_len={limits.max_new_tokens} or "
                f"boundary_write_tokens={config.boundary_write_tokens}"
            )
        self.observation = min(config.boundary_observation_tokens, headroom // 2)
        """Tokens of the next observation that are provided for."""
        self.reserve = reserve + self.observation

    def request_is_due(self) -> bool:
        """Whether after another exchange a boundary might not fit any more."""
        if self.conversation.turns_left < ACTIONS_AFTER_REQUEST:
            return False
        return self.conversation.prompt_length() + self.reserve > self.capacity

    async def respond(self, stop: Sequence[str], max_new_tokens: int) -> Sampled | None:
        """One response, unless the prompt is over the ceiling: then it is not served."""
        if self.conversation.turns_left and self.conversation.prompt_length() > self.capacity:
            self.conversation.ended = "context"
            return None
        return await self.conversation.respond(stop=stop, max_new_tokens=max_new_tokens)
