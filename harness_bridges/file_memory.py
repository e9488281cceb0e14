"""`file_memory`: a private workspace outlives the context; the policy writes and reads it with
bash (000, App. A.2 and C.2; 001, 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

from harness_bridges.boundary import MEMORY_BYTES, BoundaryConfig, play
from harness_bridges.chat import Message, Sampled, with_note
from harness_bridges.conversation import Conversation
from harness_bridges.engine import FileState, ShellResult
from harness_bridges.harness import register_harness
from harness_bridges.tools import Call, find_call

PATH = ".agent_memory/CONTINUATION.md"
USAGE = (
    "You may also reply with exactly <bash>a command</bash>: it runs in a private workspace whose "
    "files outlive your context. Keep notes under .agent_memory/."
)
REQUEST = (
    f"Your context is about to be replaced. Save what you need to go on in {PATH} (at most "
    f"{MEMORY_BYTES} bytes) with one <bash>command</bash>, for example:\n"
    f"<bash>mkdir -p .agent_memory && cat > {PATH} <<'END'\n...\nEND</bash>"
)
NEUTRAL = f"Your context was replaced. The continuation file is {PATH}."


class BashMemory:
    """The workspace of one episode, and the last continuation that was accepted."""

    tools: tuple[str, ...] = ("bash",)
    usage, request, kind = USAGE, REQUEST, "replace"

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.accepted: bytes | None = None

    async def use(self, call: Call) -> str:
        shell = await self.conversation.shell()
        return shown(await shell.run(call.body))

    async def write(self, response: Sampled) -> str:
        call = find_call(response.text, self.tools)
        if call is None:
            return "There is no complete <bash>command</bash> in your reply."
        self.conversation.note_call(call.tool, response)
        shell = await self.conversation.shell()
        before = await shell.look(PATH, MEMORY_BYTES)
        result = await shell.run(call.body)
        after = await shell.look(PATH, MEMORY_BYTES)
        problem = problem_of(result, before, after, self.accepted)
        if not problem:
            self.accepted = after.content
        return problem

    def fresh(self, opening: Sequence[Message], response: Sampled) -> list[Message]:
        return with_note(opening, NEUTRAL)


def shown(result: ShellResult) -> str:
    """A command's result as an observation."""
    stopped = f" (stopped: limit of {result.limit})" if result.limit else ""
    return f"[exit code {result.exit_code}{stopped}]\n{result.output}"


def problem_of(
    result: ShellResult, before: FileState, after: FileState, accepted: bytes | None
) -> str:
    """What makes a continuation write invalid (000, App. A.2), or nothing."""
    if result.exit_code != 0:
        return shown(result)
    if after.kind == "missing":
        return f"{PATH} does not exist."
    if after.kind != "file":
        return f"{PATH} is a {after.kind}; it must be a regular file."
    if not after.content:
        return f"{PATH} is empty."
    if len(after.content) > MEMORY_BYTES:
        return f"{PATH} has more than {MEMORY_BYTES} bytes."
    if after.changed == before.changed:
        return f"Your command did not write {PATH}."
    if after.content == accepted:
        return f"{PATH} says the same as at the last boundary."
    return ""


@register_harness("file_memory")
class FileMemory:
    """Ordinary files as memory; the boundary needs a valid continuation file.

    After it the context is the task, the tool instructions and a line that names the path; what
    the file says is never injected, the policy reads it.
    """

    Config = BoundaryConfig

    def __init__(self, config: BoundaryConfig) -> None:
        self.config = config

    async def run(self, conversation: Conversation) -> None:
        await play(conversation, BashMemory(conversation), self.config)

    @staticmethod
    def demonstrate(turn: int, prompt: str) -> str | None:
        """The probe's schedule: write when asked to, read when the context is new."""
        if REQUEST in prompt:
            note = f"mkdir -p .agent_memory && echo 'notes of turn {turn}' > {PATH}"
            return f"<bash>{note}</bash>"
        read = f"<bash>cat {PATH}</bash>"
        return read if NEUTRAL in prompt and read not in prompt else ""
