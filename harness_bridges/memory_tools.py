"""`memory_tools`: the six dedicated memory calls, the first interface control of 000 (6.1)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from harness_bridges.boundary import MEMORY_BYTES, BoundaryConfig, play
from harness_bridges.chat import Message, Sampled, with_note
from harness_bridges.conversation import Conversation
from harness_bridges.harness import register_harness
from harness_bridges.tools import Call, find_call, json_object

KEY = "continuation"
ADD, UPDATE, DELETE, LIST, READ, SEARCH = TOOLS = (
    "memory_add",
    "memory_update",
    "memory_delete",
    "memory_list",
    "memory_read",
    "memory_search",
)
ARGUMENTS = {
    ADD: ("key", "text"),
    UPDATE: ("key", "text"),
    DELETE: ("key",),
    LIST: (),
    READ: ("key",),
    SEARCH: ("text",),
}
_FORMS = "\n".join(
    f"<{tool}>{{{', '.join(f'{json.dumps(name)}: ...' for name in names)}}}</{tool}>"
    for tool, names in ARGUMENTS.items()
)
USAGE = f"You have a memory that outlives your context. You may also reply with one of:\n{_FORMS}"
REQUEST = (
    f'Your context is about to be replaced. Save what you need to go on under the key "{KEY}" (at '
    f"most {MEMORY_BYTES} bytes) with {ADD} or, if it exists, {UPDATE}."
)
NEUTRAL = f'Your context was replaced. The memory key is "{KEY}".'


class ToolMemory:
    """The records of one episode, and the last continuation that was accepted."""

    tools: tuple[str, ...] = TOOLS
    usage, request, kind = USAGE, REQUEST, "replace"

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.records: dict[str, str] = {}
        self.accepted: str | None = None

    async def use(self, call: Call) -> str:
        return self._call(call)[1]

    async def write(self, response: Sampled) -> str:
        call = find_call(response.text, TOOLS)
        if call is None:
            return f"There is no complete {ADD} or {UPDATE} call in your reply."
        self.conversation.note_call(call.tool, response)
        done, text = self._call(call)
        if not done:
            return text
        if call.tool not in (ADD, UPDATE) or _read(call).get("key") != KEY:
            return f'Your call did not write the key "{KEY}".'
        record = self.records[KEY]
        if not record.strip():
            return f'The record "{KEY}" is empty.'
        if len(record.encode()) > MEMORY_BYTES:
            return f'The record "{KEY}" has more than {MEMORY_BYTES} bytes.'
        if record == self.accepted:
            return f'The record "{KEY}" says the same as at the last boundary.'
        self.accepted = record
        return ""

    def fresh(self, opening: Sequence[Message], response: Sampled) -> list[Message]:
        return with_note(opening, NEUTRAL)

    def _call(self, call: Call) -> tuple[bool, str]:
        """Whether the call succeeded, and the observation."""
        arguments = _read(call)
        wanted = ARGUMENTS[call.tool]
        if set(arguments) != set(wanted):
            return False, f"{call.tool} needs JSON with {' and '.join(wanted) or 'no key'}."
        key, text = arguments.get("key", ""), arguments.get("text", "")
        if call.tool == LIST:
            return True, "\n".join(self.records) or "The memory is empty."
        if call.tool == SEARCH:
            hits = [k for k, v in self.records.items() if text.casefold() in v.casefold()]
            return True, "\n".join(hits) or "No record has this text."
        if call.tool == ADD and key in self.records:
            return False, f"The key {key!r} exists; use {UPDATE}."
        if call.tool != ADD and key not in self.records:
            return False, f"There is no key {key!r}. Keys: {', '.join(self.records) or 'none'}."
        if call.tool == READ:
            return True, self.records[key]
        if call.tool == DELETE:
            del self.records[key]
            return True, "Deleted."
        self.records[key] = text
        return True, "Saved."


def _read(call: Call) -> dict[str, str]:
    """The call's arguments; those that are no text are left out."""
    found = json_object(call.body or "{}")
    if found is None:
        return {"": ""}  # no tool has such an argument
    return {k: v for k, v in found.items() if isinstance(v, str)}


@register_harness("memory_tools")
class MemoryTools:
    """A key-value memory behind six calls; the boundary needs a valid record `continuation`."""

    Config = BoundaryConfig

    def __init__(self, config: BoundaryConfig) -> None:
        self.config = config

    async def run(self, conversation: Conversation) -> None:
        await play(conversation, ToolMemory(conversation), self.config)

    @staticmethod
    def demonstrate(turn: int, prompt: str) -> str | None:
        """The probe's schedule: write when asked to, read when the context is new."""
        if REQUEST in prompt:
            tool = UPDATE if NEUTRAL in prompt else ADD
            body = json.dumps({"key": KEY, "text": f"notes of turn {turn}"})
            return f"<{tool}>{body}</{tool}>"
        read = f"<{READ}>{json.dumps({'key': KEY})}</{READ}>"
        return read if NEUTRAL in prompt and read not in prompt else ""
