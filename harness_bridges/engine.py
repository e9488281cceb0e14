"""What a bridge needs of the outside world: an engine, a chat tokenizer, a task's session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness_bridges.record import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What an engine sampled for one prompt."""

    output_ids: IntArray
    """int64 `[N]`."""
    output_logprobs: FloatArray
    """float64 `[N]`: natural log, at the sampling temperature, before any top-k/top-p cut."""
    finish_reason: str
    weight_version: str


class Engine(Protocol):
    """Tokens in, tokens out."""

    async def generate(
        self,
        prompt_ids: IntArray,
        *,
        max_new_tokens: int,
        temperature: float,
        stop: Sequence[str],
    ) -> Generation:
        """Sample from the model; a stop string's own tokens are part of the output."""
        ...


class ChatTokenizer(Protocol):
    """The model's own tokenizer and chat template."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; special tokens in the text become their ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text of the ids, special tokens included."""
        ...

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template's text, with the generation prompt at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answers to one policy response."""

    observation: str
    """Text for the policy; empty if the episode is over."""
    done: bool
    reward: float = 0.0
    """Reward that this response earned."""


class Session(Protocol):
    """One episode of one task. Native errors are observations, never exceptions.

    A session may also have `final`: those of its stop strings that close the episode (an answer,
    a submission). A harness that does something before the last response looks for them. With
    `demonstrate()`, the next right response as text, the pitfall probe can use it.
    """

    @property
    def opening(self) -> Sequence[tuple[str, str]]:
        """`(role, text)` of the messages that the policy starts from."""
        ...

    @property
    def stop(self) -> Sequence[str]:
        """Strings at which a response ends."""
        ...

    def step(self, response: str) -> Step:
        """Act on one policy response."""
        ...

    def close(self) -> None:
        """Release what the episode held."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellResult:
    """What a command did, as far as its limits let it."""

    output: str
    """Standard output and error as they came, undecodable bytes replaced, cut at the limit."""
    exit_code: int
    """124: stopped at the time limit; 137: killed."""
    limit: str = ""
    """The limit that stopped it (`seconds`, `output bytes`, ...); empty: it ended by itself."""


@dataclass(frozen=True, slots=True)
class FileState:
    """One path of a workspace, looked at without following a symbolic link."""

    kind: str
    """`file`, `missing`, or what else it is."""
    content: bytes = b""
    """Of a file: its first bytes, one more than was asked for if there are more."""
    changed: str = ""
    """Of a file: differs after every write to it."""


class Shell(Protocol):
    """A private workspace with a command line, walled off from the host and other episodes."""

    async def run(self, command: str) -> ShellResult:
        """Run a command with bash in the workspace. Whatever it does, this returns in bounded
        time with bounded output, and none of its processes is left."""
        ...

    async def look(self, path: str, limit: int) -> FileState:
        """The state of a path relative to the workspace and up to `limit` bytes of it."""
        ...

    async def close(self) -> None:
        """Remove the workspace."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """How long an episode may become."""

    max_turns: int = 30
    """Policy responses, summaries not counted (002, F.1: T = 30)."""
    max_new_tokens: int = 512
    """Sampled tokens of one model call (slime: rollout_max_response_len)."""
    max_context: int = 8192
    """Prompt and response of one model call (slime: rollout_max_context_len)."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIds:
    """Who an episode is."""

    rollout_id: int
    group_id: int
    session_id: str
    task_id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
