"""The claim on a real pretrained model: SmolLM2-135M in float32, sampled and trained for real."""

import pytest

from camp_plugin.local.config import build_config
from camp_plugin.local.host import LocalHost
from camp_plugin.local.log import progress_bar
from camp_plugin.local.model import load_model, model_dir
from camp_plugin.local.run import Rollouts, collect
from camp_plugin.local.trainer import Trainer
from camp_plugin.probe import probe
from rollout_adapters.tokenizer import HFChat

SETTINGS = {
    "hf_checkpoint": "smollm2",
    "rollout_batch_size": 1,
    "n_samples_per_prompt": 2,
    "global_batch_size": 2,
    "rollout_temperature": 0.8,
    "rollout_max_response_len": 24,
    "rollout_max_context_len": 1024,
    "camp_max_turns": 5,
    "search_qa_max_words": 40,
}
FOLDING = {"agentfold_threshold": 300, "agentfold_summary_tokens": 24}


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2")


def episodes(model, path, **settings):
    rollouts = Rollouts(build_config({**SETTINGS, **settings}), model)
    with progress_bar(quiet=True) as progress:
        found = collect(rollouts, 0, path, progress)
    rollouts.engine.close()
    return found


@pytest.fixture(scope="module")
def folded(model, tmp_path_factory):
    found = episodes(model, tmp_path_factory.mktemp("a") / "e.jsonl.zst", **FOLDING)
    assert all(any(edit.kind == "fold" for edit in e.edits) for e in found)
    return found


def test_exact_methods_sit_at_the_floor_and_naive_ones_do_not(model, folded, tmp_path):
    control = episodes(model, tmp_path / "e.jsonl.zst", camp_harness="search_r1")
    host = LocalHost(model)
    decode = HFChat.from_pretrained(model_dir("smollm2")).decode
    floor = probe(control, host, decode).summary()["methods"]["logit_tree"]["camp/logdiff_mean"]
    summary = probe(folded, host, decode).summary()
    found = {name: row["camp/logdiff_mean"] for name, row in summary["methods"].items()}
    for method in ("logit_tree", "packed_mask"):
        assert summary["methods"][method]["camp/logdiff_max"] <= 1e-4
        assert found[method] <= 1.5 * floor
    for method in ("naive_compressed", "naive_full"):
        assert found[method] >= 20 * floor
    assert summary["camp/delta_comp"]["n"] > 0
    assert summary["junctions"] > 0 and summary["retokenised"] == 0


def test_the_hooks_see_the_same_drift_as_the_probe(model, folded):
    settings = {**SETTINGS, **FOLDING, "camp_method": "packed_mask", "lr": 0.0}
    (metrics,) = Trainer(build_config(settings), model).train(folded, 0)
    assert metrics["camp/logdiff_max"] <= 1e-4
    assert metrics["loss_tokens"] == sum(e.num_sampled for e in folded)
