"""The facade and the direction of imports."""

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import camp_plugin

ROOT = Path(camp_plugin.__file__).parents[1]
ORDER = ("camp_plugin", "rollout_adapters", "loss_hooks", "harness_bridges")


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("name", camp_plugin.__all__)
def test_every_name_resolves_as_a_host_resolves_it(name):
    assert callable(getattr(import_module("camp_plugin"), name))


def test_names_stay_callables_after_every_submodule_is_imported():
    code = (
        "import camp_plugin, camp_plugin.cli, camp_plugin.probe, camp_plugin.report.tables\n"
        "import camp_plugin.local.run, camp_plugin.local.demo\n"
        "import types\n"
        "print([n for n in camp_plugin.__all__"
        " if isinstance(getattr(camp_plugin, n), types.ModuleType)])"
    )
    assert python(code) == "[]"
    files = {path.stem for path in (ROOT / "camp_plugin").iterdir()}
    assert files.isdisjoint(camp_plugin.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'sdccc'"):
        camp_plugin.sdccc  # noqa: B018


def test_importing_the_facade_is_cheap_and_loads_no_torch():
    code = (
        "import sys, time; t = time.perf_counter(); import camp_plugin; "
        "print(time.perf_counter() - t, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    seconds, *loaded = python(code).split()
    assert float(seconds) < 0.05 and loaded == ["False", "False"]


def test_hooks_are_picklable():
    import pickle

    for name in ("sdcc", "packed_mask", "logit_tree", "convert_samples_to_train_data"):
        hook = getattr(camp_plugin, name)
        assert pickle.loads(pickle.dumps(hook)) is hook


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_to_their_right(package):
    allowed = ORDER[ORDER.index(package) :]
    for path in (ROOT / package).rglob("*.py"):
        wrong = {name for name in imported(path) if name in ORDER} - set(allowed)
        assert not wrong, f"{path} imports {wrong}"


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("harness_bridges", {"torch", "transformers", "slime", "megatron", "starlette"}),
        ("loss_hooks", {"transformers", "slime", "megatron", "httpx"}),
        ("rollout_adapters", {"slime", "megatron", "torch"}),
        ("camp_plugin", {"slime", "megatron"}),
    ],
)
def test_packages_stay_within_their_dependencies(package, forbidden):
    for path in (ROOT / package).rglob("*.py"):
        wrong = set(imported(path)) & forbidden
        assert not wrong, f"{path} imports {wrong}"


def test_all_packages_are_listed_for_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in ORDER
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert set(listed) == found
