"""Whatever a command does, the observation is bounded and nobody else notices (both backends)."""

import asyncio
import tempfile
import time
from pathlib import Path

import pytest
from support.harnesses import backends

from harness_bridges.errors import ConfigError
from rollout_adapters.sandbox.cgroup import Cgroup
from rollout_adapters.sandbox.config import SandboxConfig
from rollout_adapters.sandbox.sandbox import Sandbox

LIMITS = {
    "sandbox_seconds": 3,
    "sandbox_memory_mib": 128,
    "sandbox_disk_mib": 8,
    "sandbox_files": 100,
    "sandbox_processes": 32,
}
pytestmark = pytest.mark.skipif(not backends(), reason="needs bubblewrap or a docker engine")


@pytest.fixture(params=backends())
def run(request):
    """Runs commands one after the other in one workspace; returns their results."""

    def commands(*texts, look=None):
        async def inside():
            shell = await Sandbox(SandboxConfig(camp_sandbox=request.param, **LIMITS)).open()
            try:
                found = [await shell.run(text) for text in texts]
                return found if look is None else await shell.look(look, 8)
            finally:
                await shell.close()

        return asyncio.run(inside())

    return commands


def test_files_outlive_commands_and_processes_do_not(run):
    first, second = run("echo hi > a; sleep 99 & echo $?", "cat a; pgrep -c sleep")
    assert (first.exit_code, first.output) == (0, "0\n")
    assert second.output == "hi\n0\n"


@pytest.mark.parametrize(
    "command",
    [
        ":(){ :|:& };: ; sleep 99",
        "kill -9 -1",
        "setsid sleep 99 & disown; while true; do :; done",
        "trap '' TERM; sleep 99",
        "python3 -c \"x = b'a' * (1 << 30)\"",
        "rm -rf / 2>/dev/null; mkfifo p; cat p",
        "dd if=/dev/zero of=/dev/shm/x bs=1M count=999; dd if=/dev/zero of=/tmp/x bs=1M count=999",
    ],
)
def test_abuse_ends_in_bounded_time_and_the_workspace_goes_on(run, command):
    start = time.monotonic()
    _, after = run(command, "echo fine")
    assert time.monotonic() - start < 30
    assert (after.exit_code, after.output) == (0, "fine\n")


def test_time_and_output_are_limited_and_named(run):
    slow, loud = run("echo begun; sleep 99", "yes")
    assert (slow.exit_code, slow.limit, slow.output) == (124, "seconds", "begun\n")
    assert loud.limit == "output bytes" and len(loud.output) == 65536


def test_disk_and_files_are_limited(run):
    full, many, _ = run(
        "dd if=/dev/zero of=big bs=1M count=99 2>/dev/null; stat -c %s big; rm big",
        "for i in $(seq 300); do touch f$i 2>/dev/null || break; done; ls | wc -l; rm f*",
        "true",
    )
    assert int(full.output.split()[-1]) <= 8 << 20
    assert int(many.output) < 100


def test_nothing_outside_is_seen_or_written(run):
    (found,) = run(
        "cat /etc/passwd; ls /root /home; touch /usr/x /x; ln -s / up; ls up/root; "
        "python3 -c \"import socket; socket.create_connection(('192.0.2.1', 53), 2)\" 2>&1"
    )
    assert "root:x" not in found.output and "Network is unreachable" in found.output
    assert "Read-only file system" in found.output


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("mkdir d; echo 0123456789 > d/f", "file"),
        ("mkdir d; ln -s /etc/hostname d/f", "symbolic link"),
        ("mkdir e; echo x > e/f; ln -s e d", "missing"),
        ("mkdir -p d/f", "directory"),
        ("mkdir d; mkfifo d/f", "special file"),
        ("true", "missing"),
    ],
)
def test_look_follows_no_link(run, command, kind):
    state = run(command, look="d/f")
    assert state.kind == kind
    if kind == "file":
        assert state.content == b"012345678" and state.changed


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="camp_sandbox='podman': expected one of auto"):
        SandboxConfig(camp_sandbox="podman")
    with pytest.raises(ConfigError, match="sandbox_seconds=0: must be at least 1"):
        SandboxConfig(sandbox_seconds=0)


@pytest.mark.parametrize("command", ("echo \0", "true " + "x" * (128 << 10)))
def test_commands_that_the_system_cannot_take_are_answered(run, command):
    refused, after = run(command, "echo fine")
    assert refused.exit_code == 126 and refused.output.startswith("The command has")
    assert after.output == "fine\n"


def test_a_workspace_without_permissions_is_repaired_for_the_next_command(run):
    locked, after = run("echo a > b; chmod 000 .", "cat b")
    assert locked.exit_code == 0 and after.output == "a\n"


needs_bubblewrap = pytest.mark.skipif("bubblewrap" not in backends(), reason="needs bubblewrap")


def groups():
    return {p for kind in ("memory", "pids") for p in Path("/sys/fs/cgroup", kind).glob("camp-*")}


@needs_bubblewrap
def test_cancelling_leaves_nothing_behind():
    """As when a sibling episode fails: while it opens, and in the middle of a command."""

    async def cancelled(delay):
        async def episode():
            shell = await Sandbox(config).open()
            try:
                await shell.run("sleep 60")
            finally:
                await shell.close()

        task = asyncio.create_task(episode())
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    config = SandboxConfig(camp_sandbox="bubblewrap", **LIMITS)
    before = set(Path(tempfile.gettempdir()).glob("camp-*")), groups()
    for delay in (0.0, 0.005, 0.01, 0.02, 0.3):
        asyncio.run(cancelled(delay))
    assert (set(Path(tempfile.gettempdir()).glob("camp-*")), groups()) == before


@needs_bubblewrap
def test_without_control_groups_shared_memory_is_limited_and_the_user_warned(monkeypatch):
    monkeypatch.setattr(Cgroup, "make", classmethod(lambda cls, name, config: cls([])))

    async def inside():
        shell = await Sandbox(SandboxConfig(camp_sandbox="bubblewrap", **LIMITS)).open()
        try:
            return await shell.run(
                "dd if=/dev/zero of=/dev/shm/x bs=1M count=99; stat -c %s /dev/shm/x; touch /dev/y"
            )
        finally:
            await shell.close()

    with pytest.warns(UserWarning, match="may not make control groups"):
        result = asyncio.run(inside())
    assert str(LIMITS["sandbox_disk_mib"] << 20) in result.output
    assert "Read-only" in result.output
