"""The commands as a user runs them, on a tiny model directory."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from support.models import tiny_model_dir

from camp_plugin.cli import main
from harness_bridges.store import read_episodes

SETTINGS = {
    "agentfold_threshold": 720,
    "agentfold_summary_tokens": 16,
    "rollout_batch_size": 1,
    "n_samples_per_prompt": 2,
    "global_batch_size": 2,
    "rollout_max_response_len": 24,
    "rollout_max_context_len": 3000,
    "camp_max_turns": 5,
    "cpu_threads": 1,
    "lr": 1e-3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model")))


def config(tmp_path, model, **overrides):
    path = tmp_path / "config.yaml"
    values = {"hf_checkpoint": model, "runs_dir": str(tmp_path / "runs"), **SETTINGS, **overrides}
    path.write_text(yaml.safe_dump(values))
    return path


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_train_runs_rollouts_and_updates_the_weights(tmp_path, model):
    path = config(tmp_path, model, num_rollout=2, camp_method="packed_mask")
    assert main(["train", "--config", str(path), "--set", "run_name=a"]) == 0
    directory = tmp_path / "runs" / "a"
    logged = rows(directory)
    assert [(r["step"], r["method"]) for r in logged] == [(0, "packed_mask"), (1, "packed_mask")]
    assert all(r["camp/logdiff_max"] < 1e-4 for r in logged)
    episodes = list(read_episodes(directory / "episodes.jsonl.zst"))
    versions = [{t.weight_version for t in e.turns} for e in episodes]
    assert versions == [{"0"}] * 2 + [{"1"}] * 2, "the engine samples with the new weights"
    assert any(edit.kind == "fold" for e in episodes for edit in e.edits)
    assert (directory / "checkpoint" / "step_000002" / "model.safetensors").exists()
    assert list((directory / "tensorboard").rglob("events*"))


def test_demo_ends_with_the_matrix(tmp_path, model, capsys):
    path = config(tmp_path, model)
    assert main(["demo", "--config", str(path), "--set", "run_name=d"]) == 0
    out = capsys.readouterr().out
    assert "step time" in out and "logit_tree" in out
    directory = tmp_path / "runs" / "d"
    assert (directory / "matrix.png").read_bytes().startswith(b"\x89PNG")
    summary = {r["method"]: r for r in rows(directory) if r.get("summary")}
    assert set(summary) == {
        "naive_compressed",
        "naive_full",
        "logit_tree",
        "packed_mask",
        "sdcc",
        "no_edit",
    }
    floor = summary["no_edit"]["camp/logdiff_mean"]
    assert summary["no_edit"]["camp/edit_freq"] == 0.0
    for method in ("logit_tree", "packed_mask"):
        assert summary[method]["camp/logdiff_max"] <= 1e-4
    for method in ("naive_compressed", "naive_full"):
        assert summary[method]["camp/logdiff_mean"] > 20 * floor
    assert (
        summary["sdcc"]["camp/leaves"] > 0 and summary["naive_compressed"]["step_time_ratio"] == 1
    )
    assert main(["demo", "--config", str(path), "--set", "run_name=d"]) == 2, "kept, not mixed"


def test_demo_of_one_method_on_another_harness_keeps_the_yardstick(tmp_path, model):
    path = config(tmp_path, model)
    settings = ["--set", "run_name=s", "--set", "camp_harness=search_r1"]
    assert main(["demo", "--config", str(path), "--methods", "logit_tree", *settings]) == 0
    summary = [r for r in rows(tmp_path / "runs" / "s") if r.get("summary")]
    assert [r["method"] for r in summary] == ["naive_compressed", "logit_tree", "no_edit"]
    assert all(r["camp/edit_freq"] == 0 for r in summary)


def test_probe_prints_json_or_tables(tmp_path, model, capsys):
    path = config(tmp_path, model)
    main(["train", "--config", str(path), "--set", "run_name=p", "--set", "lr=0.0"])
    store = str(tmp_path / "runs" / "p" / "episodes.jsonl.zst")
    capsys.readouterr()
    assert main(["probe", store, "--model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    exact, naive = found["methods"]["packed_mask"], found["methods"]["naive_compressed"]
    assert exact["camp/logdiff_max"] < 1e-4 < naive["camp/logdiff_mean"]
    assert found["methods"]["logit_tree"]["loss_tokens"] == exact["loss_tokens"]
    assert found["camp/delta_comp"]["n"] > 0
    assert main(["probe", store, "--model", model]) == 0
    assert "camp/delta_full" in capsys.readouterr().out


def run_train(path, *overrides):
    sets = [word for item in overrides for word in ("--set", item)]
    command = [sys.executable, "-m", "camp_plugin.cli", "train", "--config", str(path), *sets]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(directory):
    keys = ("step", "loss", "grad_norm", "camp/kl_sdcc", "camp/logdiff_mean")
    return [{key: row[key] for key in keys} for row in rows(directory)]


def test_kill_minus_nine_and_restart_give_the_same_losses(tmp_path, model):
    """Replayed episodes: bit for bit. Killed twice, while training and between steps."""
    episodes = str(tmp_path / "runs" / "source" / "episodes.jsonl.zst")
    path = config(tmp_path, model, num_rollout=6)
    assert main(["train", "--config", str(path), "--set", "run_name=source"]) == 0
    replay = f"load_debug_rollout_data={episodes}"
    process = run_train(path, "run_name=whole", replay)
    assert process.wait(300) == 0, process.stderr.read()
    for survived in (2, 4):
        process = run_train(path, "run_name=killed", replay)
        log = tmp_path / "runs" / "killed" / "metrics.jsonl"
        while not log.exists() or log.read_text().count("\n") < survived:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    process = run_train(path, "run_name=killed", replay)
    assert process.wait(300) == 0, process.stderr.read()
    assert losses(tmp_path / "runs" / "killed") == losses(tmp_path / "runs" / "whole")


def test_a_run_killed_between_episodes_keeps_those_that_were_finished(tmp_path, model):
    path = config(
        tmp_path,
        model,
        num_rollout=1,
        n_samples_per_prompt=6,
        global_batch_size=6,
        camp_max_turns=12,
    )
    process = run_train(path, "run_name=r")
    store = tmp_path / "runs" / "r" / "episodes.jsonl.zst"
    while not store.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    before = {e.rollout_id: e.turns[0].output_ids.tolist() for e in read_episodes(store)}
    assert main(["train", "--config", str(path), "--set", "run_name=r"]) == 0
    after = [(e.rollout_id, e.turns[0].output_ids.tolist()) for e in read_episodes(store)]
    assert len(after) == 6 == len({rollout for rollout, _ in after})
    assert before.items() <= dict(after).items()


def test_another_configuration_in_the_same_run_is_refused(tmp_path, model, capsys):
    path = config(tmp_path, model)
    assert main(["train", "--config", str(path)]) == 0
    assert main(["train", "--config", str(path), "--set", "lr=0.5"]) == 2
    assert "was started with another lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--config", "no.yaml"], "--config no.yaml: there is no such file"),
        (["demo", "--methods", "all,best"], "--methods all,best: choose from"),
        (["demo", "--set", "hf_checkpoint=/no/such"], "hf_checkpoint='/no/such': no config.json"),
        (["probe", "no.jsonl", "--model", "x"], "no.jsonl: there is no such file"),
    ],
)
def test_a_users_fault_is_one_line_and_exit_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("camp-plugin: ") and message in err and "Traceback" not in err


def test_engine_serves_until_interrupted(model):
    command = [sys.executable, "-m", "camp_plugin.cli", "engine", "--model", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = re.search(r"http://\S+", process.stdout.readline()).group()
        import httpx

        info = httpx.get(f"{url}/get_model_info").json()
        assert os.path.samefile(info["model_path"], model) and info["weight_version"] == "0"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_without_its_extra_the_command_says_what_to_install(capsys, monkeypatch):
    def missing(arguments):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("camp_plugin.cli._engine", missing)
    assert main(["engine", "--model", "x"]) == 2
    assert "pip install 'camp-plugin[local]'" in capsys.readouterr().err
