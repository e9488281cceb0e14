"""JSON Lines, plain and compressed: round trip, torn lines, crashes, refusals."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings

import pytest
from support.episodes import edited_episode, episode

from harness_bridges import store
from harness_bridges.branches import episode_tape
from harness_bridges.errors import RecordError
from harness_bridges.store import (
    TornLineWarning,
    append_episode,
    episode_to_json,
    read_episodes,
)

NAMES = ("episodes.jsonl", "episodes.jsonl.zst")


BAD_EDIT = {"turn": 1, "position": 2, "inserted": [], "kind": "pop", "cause": "policy"}


def episodes(count=3):
    raw = [edited_episode(i, 97, rollout_id=i, reward=i / 2) for i in range(count)]
    asserted = episode(
        raw[0].turns, edits=episode_tape(raw[0]).edits, metadata={"a": [1, {"b": 2}]}
    )
    return [asserted, *raw[1:]]


def write(path, items):
    for item in items:
        append_episode(path, item)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(tmp_path, name):
    written = episodes()
    write(tmp_path / name, written)
    read = list(read_episodes(tmp_path / name))
    assert [episode_to_json(e) for e in read] == [episode_to_json(e) for e in written]
    assert read[0].edits and read[1].edits is None


def test_each_line_carries_the_schema_version(tmp_path):
    write(tmp_path / NAMES[0], episodes())
    lines = (tmp_path / NAMES[0]).read_text().splitlines()
    assert [json.loads(line)["schema"] for line in lines] == [1, 1, 1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lost", (1, 7, 60))
def test_a_torn_last_line_is_reported_and_nothing_else_is_lost(tmp_path, name, lost):
    path = tmp_path / name
    write(path, episodes())
    os.truncate(path, path.stat().st_size - lost)
    if name.endswith(".jsonl") and lost == 1:  # only the newline is gone: the episode is whole
        assert [e.rollout_id for e in read_episodes(path)] == [0, 1, 2]
        return
    with pytest.warns(TornLineWarning, match="incomplete"):
        read = list(read_episodes(path))
    assert [e.rollout_id for e in read] == [0, 1]


@pytest.mark.parametrize("name", NAMES)
def test_appending_after_a_crash_keeps_old_and_new(tmp_path, name):
    path = tmp_path / name
    first = episodes()
    write(path, first)
    os.truncate(path, path.stat().st_size - 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        append_episode(path, first[2])
        read = list(read_episodes(path))
    assert [e.rollout_id for e in read] == [0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_kill_minus_nine_while_writing_loses_at_most_the_last_episode(tmp_path, name):
    path = tmp_path / name
    code = """
        import sys
        sys.path.insert(0, sys.argv[2])
        from support.episodes import episode
        from harness_bridges.store import append_episode
        i = 0
        while True:
            prompt = list(range(3000))
            append_episode(sys.argv[1], episode([(prompt, [i % 7])], rollout_id=i))
            i += 1
            print(i, flush=True)
    """
    tests = os.path.dirname(os.path.dirname(__file__))
    command = [sys.executable, "-c", textwrap.dedent(code), str(path), tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        acknowledged = 0
        while acknowledged < 15:
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        found = [e.rollout_id for e in read_episodes(path)]
    assert found[:acknowledged] == list(range(acknowledged))


@pytest.mark.parametrize("damage", ("flipped", "plain"))
def test_a_damaged_store_is_refused_and_never_shortened(tmp_path, damage):
    path = tmp_path / NAMES[1]
    write(path, episodes(3))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data) if damage == "flipped" else b"not compressed at all\n")
    before = path.read_bytes()
    store._verified.clear()
    for use in (lambda: list(read_episodes(path)), lambda: append_episode(path, episodes(1)[0])):
        with pytest.raises(RecordError, match="damaged or not compressed"):
            use()
    assert path.read_bytes() == before


BAD_LINES = [
    (lambda d: d.update(schema=9), "schema=9: this version reads schema 1"),
    (lambda d: d.pop("turns"), "turns: is missing"),
    (lambda d: d.update(color="red"), "episode: "),
    (lambda d: d["turns"][0].update(output_logprobs=[]), "turns[0]: len(output_logprobs)=0"),
    (lambda d: d["turns"][1].update(prompt_ids=[]), "turns[1]: prompt_ids: is empty"),
    (lambda d: d["turns"][1].update(prompt_ids=[[1], [2, 3]]), "turns[1]: prompt_ids: expected"),
    (lambda d: d.update(turns=5), "expected lists of records"),
    (lambda d: d.update(edits=3), "expected lists of records"),
    (lambda d: d.update(edits=[{**BAD_EDIT, "removed": [[1]]}]), "spans are pairs"),
    (lambda d: d.update(edits=[{**BAD_EDIT, "removed": [5]}]), "expected lists of records"),
    (lambda d: d.update(turn_rewards=None), "expected lists of records"),
    (lambda d: d.update(rollout_id="abc"), "rollout_id='abc': expected int"),
    (lambda d: d.update(metadata=[1]), "metadata=[1]: expected Mapping"),
    (lambda d: d.update(reward="high"), "reward='high': expected a number"),
]


@pytest.mark.parametrize(("damage", "message"), BAD_LINES)
def test_a_bad_record_is_refused_with_line_field_and_reason(tmp_path, damage, message):
    path = tmp_path / NAMES[0]
    write(path, episodes(1))
    data = json.loads(path.read_text())
    damage(data)
    with path.open("a") as file:
        file.write(json.dumps(data) + "\n")
    with pytest.raises(RecordError) as caught:
        list(read_episodes(path))
    assert f"{path}, line 2: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("line", ("[1, 2]", "null", "7"))
def test_a_line_that_is_no_object_is_refused(tmp_path, line):
    (tmp_path / "e.jsonl").write_text(line + "\n")
    with pytest.raises(RecordError, match="line 1: expected an object"):
        list(read_episodes(tmp_path / "e.jsonl"))


def test_nan_never_reaches_the_disk(tmp_path):
    bad = episode([([1], [2])], metadata={"score": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        append_episode(tmp_path / "e.jsonl", bad)
    assert not (tmp_path / "e.jsonl").exists()
