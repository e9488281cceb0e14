"""Settings: slime's names, nearest-name refusals, types, combinations."""

import pytest

from camp_plugin.local.config import (
    LocalConfig,
    UnusedSettingWarning,
    build_config,
    load_config,
)
from harness_bridges.errors import ConfigError

BASE = {"hf_checkpoint": "x"}


def test_defaults_of_all_components_are_there():
    args = build_config(BASE)
    assert (args.agentfold_threshold, args.sdcc_lambda, args.eps_clip_high) == (3000, 0.1, 0.28)
    assert (args.search_qa_top_k, args.camp_max_turns, args.sdcc_warmup_fraction) == (3, 30, 0.2)


def test_yaml_and_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("hf_checkpoint: x\nlr: 1e-6\nrollout_batch_size: 2\n")
    args = load_config(path, ["lr=2e-5", "seed=7", "eps_clip_c=3"])
    assert (args.lr, args.seed, args.eps_clip_c) == (2e-5, 7, 3.0)


BAD = [
    ({"learning_rate": 1}, "unknown setting 'learning_rate'"),
    ({"agentfold_treshold": 1}, "did you mean 'agentfold_threshold'"),
    ({"lr": float("nan")}, "lr=nan: must be finite"),
    ({"lr": -1.0}, "lr=-1.0: must not be negative"),
    ({"adam_beta1": 2.0}, "adam_beta1=2.0"),
    ({"cpu_threads": 0}, "cpu_threads=0"),
    ({"camp_harness": 5}, "harness 5: expected a name or a dotted path"),
    ({"camp_harness": "os.path"}, "harness 'os.path': os:path is no harness"),
    ({"camp_method": "json.loads"}, "json:loads is no method"),
    ({"camp_environment": "no.such.Env"}, "ModuleNotFoundError"),
    ({"camp_method": "scdd"}, "unknown method 'scdd'; did you mean 'sdcc'"),
    ({"camp_harness": "fold"}, "unknown harness 'fold'"),
    ({"camp_environment": "shop"}, "unknown environment 'shop'"),
    ({"lr": "fast"}, "lr='fast': expected float"),
    ({"seed": 1.5}, "seed=1.5: expected int"),
    ({"seed": True}, "seed=True: expected int"),
    ({"use_kl_loss": 1}, "use_kl_loss=1: expected bool"),
    ({"global_batch_size": 3}, "global_batch_size=3: must divide"),
    ({"rollout_batch_size": 0}, "rollout_batch_size=0: must be at least 1"),
    ({"rollout_temperature": 0.0}, "rollout_temperature=0.0"),
    # case 40: a cut sampler biases every ratio
    ({"rollout_top_p": 0.9}, "rollout_top_p=0.9"),
    ({"rollout_top_k": 50}, "rollout_top_k=50"),
    ({"advantage_estimator": "ppo"}, "advantage_estimator='ppo'"),
    ({"eps_clip": 2.0}, "eps_clip=2.0"),
    ({"sdcc_lambda": -1.0}, "sdcc_lambda=-1.0"),
    ({"sdcc_reduction": "max"}, "sdcc_reduction='max'"),
    ({"sdcc_warmup_fraction": 1.5}, "sdcc_warmup_fraction=1.5"),
    ({"use_tis": True, "use_rollout_logprobs": True}, "use_tis with use_rollout_logprobs"),
    ({"search_qa_top_k": 0}, "search_qa_top_k=0"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_settings_name_key_value_and_remedy(change, message):
    with pytest.raises(ConfigError) as caught:
        build_config({**BASE, **change})
    assert message in str(caught.value)


def test_a_missing_required_setting_is_named():
    with pytest.raises(ConfigError, match="hf_checkpoint: is required"):
        build_config({})


def test_settings_of_components_that_are_not_chosen_are_named_as_unused():
    with pytest.warns(UnusedSettingWarning, match="sdcc_lambda, agentfold_keep: no effect"):
        build_config(
            {
                **BASE,
                "camp_method": "naive_full",
                "camp_harness": "search_r1",
                "sdcc_lambda": 0.1,
                "agentfold_keep": 2,
            }
        )


def test_numbers_are_names_too():
    assert build_config({**BASE, "run_name": 7}).run_name == "7"


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "no.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match="expected key=value"):
        load_config(None, ["lr"])
    with pytest.raises(ConfigError, match="not valid YAML; quote it"):
        load_config(None, ["lr=["])
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_every_setting_has_a_default_but_the_model():
    fields = LocalConfig.__dataclass_fields__
    required = [n for n, f in fields.items() if f.default is f.default_factory]
    assert required == ["hf_checkpoint"]


@pytest.mark.parametrize(
    ("update", "total", "expected"),
    [(0, 100, 0.0), (10, 100, 0.05), (20, 100, 0.1), (99, 100, 0.1), (0, 1, 0.0)],
)
def test_lambda_ramps_over_the_first_fifth(update, total, expected):
    from loss_hooks.sdcc import SdccConfig, coefficient

    assert coefficient(SdccConfig(), update, total) == pytest.approx(expected)


def test_without_warmup_lambda_is_full_from_the_first_update():
    from loss_hooks.sdcc import SdccConfig, coefficient

    assert coefficient(SdccConfig(sdcc_warmup_fraction=0.0), 0, 1) == 0.1
