"""Episodes on disk: JSON Lines, one episode a line, zstd-compressed if the name ends in `.zst`.

Each append is one write of one complete line (for `.zst`, of one complete frame), flushed to the
disk. A crash can therefore only tear the last line, which a reader reports and skips.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zstandard

from harness_bridges.errors import RecordError
from harness_bridges.record import Edit, Episode, Turn

SCHEMA_VERSION = 1
_MAGIC = b"\x28\xb5\x2f\xfd"  # how every zstd frame begins

_verified: dict[str, int] = {}
"""Size of each store after this process's last append: up to there its frames are known."""


class TornLineWarning(UserWarning):
    """The last line of a store is incomplete: the writer was stopped while it wrote."""


def episode_to_json(episode: Episode) -> dict[str, Any]:
    """A plain, self-contained dict; arrays become lists. Inverse: `episode_from_json`."""
    edits = None if episode.edits is None else [_edit_to_json(edit) for edit in episode.edits]
    return {
        "schema": SCHEMA_VERSION,
        "rollout_id": episode.rollout_id,
        "group_id": episode.group_id,
        "session_id": episode.session_id,
        "task_id": episode.task_id,
        "reward": episode.reward,
        "turn_rewards": list(episode.turn_rewards),
        "status": episode.status,
        "metadata": dict(episode.metadata),
        "edits": edits,
        "turns": [_turn_to_json(turn) for turn in episode.turns],
    }


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_ids": turn.prompt_ids.tolist(),
        "output_ids": turn.output_ids.tolist(),
        "output_logprobs": turn.output_logprobs.tolist(),
        "finish_reason": turn.finish_reason,
        "weight_version": turn.weight_version,
    }


def _edit_to_json(edit: Edit) -> dict[str, Any]:
    return {
        "turn": edit.turn,
        "position": edit.position,
        "removed": [list(span) for span in edit.removed],
        "inserted": [[offset, list(span)] for offset, span in edit.inserted],
        "kind": edit.kind,
        "cause": edit.cause,
    }


def episode_from_json(data: Mapping[str, Any]) -> Episode:
    """Build and validate an episode.

    Raises:
        RecordError: unknown schema version, missing or unknown field, or a broken invariant.
    """
    if not isinstance(data, Mapping):
        raise RecordError(f"expected an object with an episode's fields, got {type(data).__name__}")
    fields = dict(data)
    schema = fields.pop("schema", None)
    if schema != SCHEMA_VERSION:
        raise RecordError(
            f"schema={schema!r}: this version reads schema {SCHEMA_VERSION}; convert the file or "
            "install the version that wrote it"
        )
    try:
        edits = fields.pop("edits")
        turns = tuple(_build(Turn, turn, f"turns[{i}]") for i, turn in enumerate(fields["turns"]))
        fields["turns"] = turns
        fields["turn_rewards"] = tuple(fields.pop("turn_rewards"))
        fields["edits"] = None if edits is None else tuple(_edit_from_json(e) for e in edits)
    except KeyError as error:
        raise RecordError(f"{error.args[0]}: is missing from the episode") from None
    except (TypeError, AttributeError) as error:
        raise RecordError(
            f"turns, edits, turn_rewards: expected lists of records: {error}"
        ) from None
    episode: Episode = _build(Episode, fields, "episode")
    return episode


def _edit_from_json(data: Mapping[str, Any]) -> Edit:
    fields = dict(data)
    try:
        fields["removed"] = tuple((a, b) for a, b in fields["removed"])
        fields["inserted"] = tuple((offset, (a, b)) for offset, (a, b) in fields["inserted"])
    except ValueError as error:
        raise RecordError(f"edits: spans are pairs of positions: {error}") from None
    edit: Edit = _build(Edit, fields, "edit")
    return edit


def _build(cls: Any, fields: Mapping[str, Any], where: str) -> Any:
    try:
        return cls(**fields)
    except TypeError as error:
        raise RecordError(f"{where}: {error}") from None
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None


def append_episode(path: str | Path, episode: Episode) -> None:
    """Append one episode atomically: either its whole line is in the file or it is torn off."""
    path = Path(path)
    line = json.dumps(episode_to_json(episode), allow_nan=False).encode() + b"\n"
    if path.suffix == ".zst":
        line = zstandard.ZstdCompressor(write_checksum=True).compress(line)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _mend_tail(descriptor, path)
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{path}: wrote {written} of {len(line)} bytes; is the disk full?")
        os.fsync(descriptor)
        _verified[str(path.absolute())] = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _mend_tail(descriptor: int, path: Path) -> None:
    """Close a torn last line, so that the next episode starts on a line of its own."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return
    if path.suffix == ".zst":
        if _verified.get(str(path.absolute())) == size:
            return
        whole = _complete_frames(os.pread(descriptor, size, 0), path)
        if whole < size:
            warnings.warn(_torn(path, "torn frame dropped before appending"), stacklevel=3)
            os.ftruncate(descriptor, whole)
    elif os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")


def _complete_frames(data: bytes, path: Path) -> int:
    """Length of the complete zstd frames; less than all of `data` if the last one is torn.

    Raises:
        RecordError: the file is damaged, not torn: something follows the bad frame, or it does
            not begin like one. Nothing is dropped then.
    """
    whole = 0
    while whole < len(data):
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        rest = data[whole:]
        damaged = not _MAGIC.startswith(rest[:4])
        try:
            decompressor.decompress(rest)
        except zstandard.ZstdError:
            damaged = True
        if not damaged and not decompressor.eof:
            # Torn, unless a damaged length made this frame swallow the ones behind it.
            damaged = _MAGIC in rest[4:]
            if not damaged:
                return whole
        if damaged:
            raise RecordError(
                f"{path}, byte {whole}: not a zstd frame of episodes; the file is damaged or not "
                "compressed, restore it or move it away (nothing was changed)"
            )
        whole = len(data) - len(decompressor.unused_data)
    return whole


def read_episodes(path: str | Path) -> Iterator[Episode]:
    """Yield the episodes of a store in order, one at a time.

    A torn line (incomplete JSON: the writer was stopped) is skipped with a `TornLineWarning`
    that names it; no other episode is lost.

    Raises:
        RecordError: a complete line that is no valid episode; the message names the line, the
            field and the reason.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError:
            warnings.warn(_torn(path, f"line {number} is incomplete and was skipped"), stacklevel=2)
            continue
        try:
            yield episode_from_json(data)
        except RecordError as error:
            raise RecordError(f"{path}, line {number}: {error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix != ".zst":
        with path.open("rb") as file:
            yield from file
        return
    data = path.read_bytes()
    whole = _complete_frames(data, path)
    if whole < len(data):
        warnings.warn(_torn(path, "the last frame is incomplete and was skipped"), stacklevel=3)
    reader = zstandard.ZstdDecompressor().stream_reader(data[:whole], read_across_frames=True)
    yield from io.BufferedReader(reader)


def _torn(path: Path, what: str) -> TornLineWarning:
    return TornLineWarning(f"{path}: {what}; its writer was stopped in the middle")
