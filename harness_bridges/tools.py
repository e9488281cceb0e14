"""The harness's own actions, written as the environment's are: `<name>body</name>`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One complete call in a response."""

    tool: str
    body: str


def find_call(text: str, tools: Sequence[str]) -> Call | None:
    """The first complete call of one of the tools; None if the response has none."""
    names = "|".join(map(re.escape, tools)) or "(?!)"
    last = {name: text.rfind(f"</{name}>") for name in tools}
    for opened in re.finditer(f"<({names})>", text):
        tool, start = opened.group(1), opened.end()
        if start <= last[tool]:
            return Call(tool, text[start : text.index(f"</{tool}>", start)])
    return None


def json_object(body: str) -> dict[str, Any] | None:
    """The call's arguments; None if its body is no JSON object whose text can be encoded."""
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def closing(tools: Iterable[str]) -> tuple[str, ...]:
    """The stop strings of the tools."""
    return tuple(f"</{name}>" for name in tools)


def is_final(text: str, session: object) -> bool:
    """Whether a response closes the episode, as far as its session says (`Session.final`)."""
    final: Sequence[str] = getattr(session, "final", ())
    return any(mark in text for mark in final)
