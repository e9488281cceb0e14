"""A third-party package plugs in by entry points alone: harness, environment and method."""

import sys

import pytest

from harness_bridges.errors import ConfigError
from harness_bridges.harness import find_harness
from loss_hooks.method import find_method
from rollout_adapters.environments.registry import find_environment

MODULE = """
from dataclasses import dataclass
from harness_bridges.search_r1 import SearchR1
from loss_hooks.method import Method
from loss_hooks.naive import compressed_rows, policy_loss

class KeepAll(SearchR1):
    pass

class World:
    @dataclass(frozen=True)
    class Config:
        world_size: int = 3
    def __init__(self, config): ...
    def tasks(self, split): return []
    def start(self, task): ...

own = Method(name="own", rows=compressed_rows, loss=policy_loss)
"""
ENTRY_POINTS = """
[camp_plugin.harnesses]
keep_all = third_party_for_test:KeepAll
broken = third_party_for_test:Missing
[camp_plugin.environments]
world = third_party_for_test:World
[camp_plugin.methods]
own = third_party_for_test:own
wrong = third_party_for_test:World
"""


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    (tmp_path / "third_party_for_test.py").write_text(MODULE)
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("third_party_for_test", None)


def test_entry_points_are_found_by_name():
    assert find_harness("keep_all").__name__ == "KeepAll"
    assert find_environment("world").Config().world_size == 3
    assert find_method("own").name == "own"


def test_settings_of_an_installed_component_are_known():
    from camp_plugin.local.config import build_config

    values = {"hf_checkpoint": "x", "camp_environment": "world", "world_size": 5}
    assert (
        build_config({**values, "camp_harness": "keep_all", "camp_method": "own"}).world_size == 5
    )


def test_broken_and_foreign_ones_are_named():
    with pytest.raises(ConfigError, match="harness 'broken': AttributeError"):
        find_harness("broken")
    with pytest.raises(ConfigError, match=r"method 'wrong': .* is no method"):
        find_method("wrong")
    with pytest.raises(ConfigError, match=r"Known: .*keep_all"):
        find_harness("nothing_like_it")
