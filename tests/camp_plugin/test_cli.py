"""The commands as a user runs them, on a tiny model directory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.models import tiny_model_dir

from camp_plugin.cli import main
from harness_bridges.store import append_episode, read_episodes

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


def test_plot_shows_a_run(tmp_path, model, capsys):
    path = config(tmp_path, model, num_rollout=2, global_batch_size=1)
    assert main(["train", "--config", str(path), "--set", "run_name=q"]) == 0
    directory = tmp_path / "runs" / "q"
    logged = rows(directory)
    assert [r["rollout"] for r in logged] == [0, 0, 1, 1]
    capsys.readouterr()
    assert main(["plot", str(directory)]) == 0
    out = capsys.readouterr().out
    steps = {r["rollout"]: r for r in logged}.values()
    evicted = sum(r["camp/evict_sessions"] for r in steps)
    assert f"{evicted:.0f}/4" in out and "sdcc" in out, "every rollout step counts once"
    assert (directory / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(tmp_path)]) == 2
    assert "metrics.jsonl: there is no such file" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["plot", str(tmp_path)]) == 2
    assert "no optimizer step" in capsys.readouterr().err


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


def test_the_method_and_harness_of_an_example_can_be_swapped(tmp_path, model, capsys):
    example = Path(__file__).parents[2] / "examples" / "agentfold_sdcc.yaml"
    sets = {
        "hf_checkpoint": model,
        "runs_dir": tmp_path,
        "num_rollout": 1,
        "run_name": 7,
        "camp_method": "logit_tree",
        "camp_harness": "search_r1",
        "cpu_threads": 1,
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", "--config", str(example), *words]) == 0
    assert "sdcc_lambda" in capsys.readouterr().err
    assert rows(tmp_path / "7")[0]["method"] == "logit_tree"


def test_the_own_environment_example_runs_as_it_says(tmp_path, model):
    folder = Path(__file__).parents[2] / "examples"
    sets = {
        "hf_checkpoint": model,
        "runs_dir": tmp_path,
        "num_rollout": 1,
        "run_name": "sums",
        "camp_environment": "own_environment.Sums",
        "cpu_threads": 1,
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    command = Path(sys.executable).with_name("camp-plugin")
    done = subprocess.run(
        [command, "train", "--config", "agentfold_sdcc.yaml", *words],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tasks = {e.task_id for e in read_episodes(tmp_path / "sums" / "episodes.jsonl.zst")}
    assert all(task.startswith("sums/train/") for task in tasks)
    shown = subprocess.run(
        [sys.executable, "own_environment.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "reward=1.0" in shown.stdout


def test_a_checkpoint_directory_belongs_to_one_run(tmp_path, model, capsys):
    path = config(tmp_path, model, save=str(tmp_path / "shared"))
    other = tmp_path / "shared" / "step_notes"
    other.mkdir(parents=True)
    assert main(["train", "--config", str(path), "--set", "run_name=a"]) == 0
    assert main(["train", "--config", str(path), "--set", "run_name=b"]) == 2
    assert "holds a checkpoint of run 'a'" in capsys.readouterr().err
    assert other.exists()


def test_a_start_that_failed_does_not_claim_the_directory(tmp_path, model, capsys):
    path = config(tmp_path, model, rollout_max_context_len=5000)
    assert main(["train", "--config", str(path)]) == 2
    assert "the model's context is 4096" in capsys.readouterr().err
    assert main(["train", "--config", str(config(tmp_path, model))]) == 0


def test_replay_keeps_groups_whole_whatever_the_order_on_disk(tmp_path, model, capsys):
    path = config(tmp_path, model, rollout_batch_size=2, global_batch_size=4)
    assert main(["train", "--config", str(path), "--set", "run_name=s"]) == 0
    episodes = list(read_episodes(tmp_path / "runs" / "s" / "episodes.jsonl.zst"))
    shuffled = tmp_path / "shuffled.jsonl"
    for e in sorted(episodes, key=lambda e: -e.rollout_id % 3):
        append_episode(shuffled, e)
    replay = ["--set", f"load_debug_rollout_data={shuffled}"]
    command = ["train", "--config", str(path), *replay]
    assert main([*command, "--set", "run_name=r"]) == 0
    assert losses(tmp_path / "runs" / "r") == losses(tmp_path / "runs" / "s")
    wrong = ["--set", "n_samples_per_prompt=1", "--set", "global_batch_size=2"]
    assert main([*command, *wrong, "--set", "run_name=w"]) == 0, "a step holds whole group 0"
    wrong = ["--set", "rollout_batch_size=1", "--set", "n_samples_per_prompt=3"]
    assert main([*command, *wrong, "--set", "global_batch_size=3", "--set", "run_name=x"]) == 2
    assert "would split group" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--config", "no.yaml"], "--config no.yaml: there is no such file"),
        (["demo", "--methods", "best", "--set", "hf_checkpoint=x"], "unknown method 'best'"),
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
