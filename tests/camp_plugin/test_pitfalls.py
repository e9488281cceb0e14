"""The pitfall probe, checked by plain forwards and by the definitions."""

import json
import math

import numpy as np
import pytest
import torch
from support.models import tiny_model_dir

from camp_plugin.cli import main
from camp_plugin.local.model import load_model
from harness_bridges.branches import episode_tape
from harness_bridges.store import read_episodes
from loss_hooks.rows import walk_targets

HARNESSES = ("search_r1", "tc_rag", "agentfold", "memexrl")
# The tiny tokenizer needs many tokens for a text.
SETTINGS = ("rollout_max_response_len=300", "agentfold_summary_tokens=20", "search_qa_top_k=1",
            "search_qa_max_words=20")  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def probed(model_dir, tmp_path_factory):
    """What the command prints, and the episodes that it kept."""
    keep = tmp_path_factory.mktemp("episodes") / "kept"
    sets = [word for item in SETTINGS for word in ("--set", item)]
    command = ["probe", "--pitfalls", "--harness", ",".join(HARNESSES), "--rollouts", "2"]
    out = pytest.MonkeyPatch()
    lines = []
    out.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
    try:
        assert main([*command, "--model", model_dir, "--save", str(keep), "--json", *sets]) == 0
    finally:
        out.undo()
    assert len(lines) == 1, "one JSON object and nothing else"
    episodes = {n: list(read_episodes(keep / f"episodes_{n}.jsonl.zst")) for n in HARNESSES}
    return json.loads(lines[0])["harnesses"], episodes


def plain_log_probs(model, prefix, tokens):
    ids = torch.tensor([[*prefix, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    rows = torch.log_softmax(logits[len(prefix) - 1 : -1], -1)
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def test_every_harness_is_there_and_edits(probed):
    found, episodes = probed
    assert tuple(found) == HARNESSES
    assert {n: found[n]["junctions"] for n in HARNESSES} == {
        "search_r1": 0.0,
        "tc_rag": 2.0,
        "agentfold": 2.0,
        "memexrl": 2.0,
    }
    kinds = {n: {e.kind for x in episodes[n] for e in x.edits} for n in HARNESSES}
    assert kinds["tc_rag"] == {"pop"} and kinds["agentfold"] == {"fold"}
    assert kinds["memexrl"] == {"offload", "retrieve"}


def test_scheduled_and_sampled_log_probs_are_the_models_own(probed, model_dir):
    model = load_model(model_dir)
    scheduled = 0
    for episodes in probed[1].values():
        for e in episodes:
            for turn in e.turns:
                expected = plain_log_probs(model, turn.prompt_ids, turn.output_ids.tolist())
                np.testing.assert_allclose(turn.output_logprobs, expected, atol=2e-4)
            spans = e.metadata["scheduled"]
            assert all(0 <= a < b <= e.turns[t].output_ids.size for t, a, b in spans)
            scheduled += len(spans)
    assert scheduled > 0


def test_rewards_are_those_of_the_right_answer(probed):
    assert all(e.reward >= 1.0 for episodes in probed[1].values() for e in episodes)


def by_definition(model, e):
    """(number of diverging leaves, Δcomp, Δfull) token by token, from prefixes as plain lists."""
    tape, left = episode_tape(e), walk_targets(e)
    walk, full = e.turns[-1].sequence.tolist(), tape.tokens.tolist()
    first_edit = min((x.turn for x in e.edits), default=math.inf)
    comp, delta_full = [], []
    for at, turn, offset in zip(left.position, left.turn, left.offset, strict=True):
        token = int(e.turns[turn].output_ids[offset])
        live = [*e.turns[turn].prompt_ids.tolist(), *e.turns[turn].output_ids[:offset].tolist()]
        (p_walk,) = plain_log_probs(model, walk[:at], [token])
        if walk[:at] != live:
            comp.append(p_walk - plain_log_probs(model, live, [token])[0])
        if turn >= first_edit:
            prefix = full[: tape.outputs[turn][0] + offset]
            delta_full.append(plain_log_probs(model, prefix, [token])[0] - p_walk)
    return comp, delta_full


@pytest.mark.parametrize("name", HARNESSES)
def test_trees_and_deltas_are_those_of_the_definitions(probed, model_dir, name):
    model = load_model(model_dir)
    found = probed[0][name]
    both = [by_definition(model, e) for e in probed[1][name]]
    comp = np.concatenate([np.array(c) for c, _ in both])
    full = np.concatenate([np.array(f) for _, f in both])
    assert found["diverging_leaves"] == comp.size / 2
    for delta, expected, sign in (("delta_comp", comp, -1), ("delta_full", full, 1)):
        row = found[delta]
        assert row["n"] == expected.size == row["sampled"]["n"] + row["scheduled"]["n"]
        if not expected.size:
            assert row["mean"] is row["majority_sign"] is row["holds"] is None
            continue
        assert abs(row["mean"] - expected.mean()) < 2e-4
        shares = {"+": (expected > 0).mean(), "-": (expected < 0).mean()}
        assert abs(row["majority_share"] - max(shares.values())) < 0.02
        agrees = expected.mean() * sign > 0 and row["majority_sign"] == "-+"[sign > 0]
        assert row["holds"] == agrees


@pytest.mark.parametrize("name", HARNESSES)
def test_evicted_tokens_are_counted_by_hand(probed, name):
    sizes = []
    for e in probed[1][name]:
        tape = episode_tape(e)
        for turn in range(1, len(e.turns)):
            before = set(tape.positions(turn - 1, output=True).tolist())
            if gone := before - set(tape.positions(turn).tolist()):
                sizes.append(len(gone))
    expected = None if not sizes else pytest.approx(sum(sizes) / len(sizes))
    assert probed[0][name]["evicted"] == expected


def test_tables_say_where_the_signs_do_not_come_out(model_dir, capsys):
    sets = [word for item in SETTINGS for word in ("--set", item)]
    command = ["probe", "--pitfalls", "--harness", "tc_rag,search_r1", "--rollouts", "1"]
    assert main([*command, "--model", model_dir, *sets]) == 0
    out = capsys.readouterr().out
    assert "K" in out and "majority" in out
    assert "nothing to measure: search_r1" in out


@pytest.mark.parametrize(
    ("words", "message"),
    (
        (["--pitfalls", "x.jsonl"], "either a file of episodes or --pitfalls"),
        ([], "either a file of episodes or --pitfalls"),
        (["x.jsonl"], "--model: is missing"),
        (["--pitfalls", "--rollouts", "0"], "--rollouts 0"),
        (["--pitfalls", "--harness", "foldd"], "unknown harness 'foldd'"),
        (["--pitfalls", "--temperature", "0.5"], "--temperature"),
        (["--pitfalls", "--set", "rollout_temperature=0.5"], "rollout_temperature=0.5"),
        (["--pitfalls", "--set", "no_such=1"], "no_such"),
    ),
)
def test_bad_arguments_name_the_remedy(words, message, model_dir, capsys):
    model = [] if "missing" in message else ["--model", model_dir]
    assert main(["probe", *words, *model]) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_probe_goes_on(model_dir, tmp_path, capsys, monkeypatch):
    sets = [word for item in SETTINGS for word in ("--set", item)]
    words = ["probe", "--pitfalls", "--harness", "tc_rag", "--model", model_dir, "--json", *sets]
    save = ["--save", str(tmp_path / "kept"), "--rollouts"]
    assert main([*words, *save, "1"]) == 0
    store = tmp_path / "kept" / "episodes_tc_rag.jsonl.zst"
    size = store.stat().st_size
    assert main([*words, *save, "2"]) == 0, "one more episode"
    assert [e.rollout_id for e in read_episodes(store)] == [0, 1]
    assert store.read_bytes()[:size] and store.stat().st_size > size
    going_on = json.loads(capsys.readouterr().out.splitlines()[-1])["harnesses"]["tc_rag"]
    assert main([*words, "--rollouts", "2"]) == 0
    at_once = json.loads(capsys.readouterr().out)["harnesses"]["tc_rag"]
    for key in ("junctions", "diverging_leaves", "evicted"):
        assert at_once[key] == going_on[key]
    assert at_once["delta_comp"]["mean"] == pytest.approx(going_on["delta_comp"]["mean"], abs=1e-4)
    assert main([*words, "--set", "seed=8", *save, "2"]) == 2
    assert "give --save another directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ("file_memory", "memory_tools", "compaction"))
def test_boundaries_fire_on_the_packaged_model(name, tmp_path, monkeypatch):
    """The probe's context sizes are made for it."""
    if name == "file_memory":
        from support.harnesses import backends

        if not backends():
            pytest.skip("needs a sandbox")
    words = ["probe", "--pitfalls", "--harness", name, "--rollouts", "1", "--save", str(tmp_path)]
    assert main(words) == 0
    (e,) = read_episodes(tmp_path / f"episodes_{name}.jsonl.zst")
    assert [x.cause for x in e.edits] == ["length"]
    assert e.status == "completed" and e.reward >= 1.0
