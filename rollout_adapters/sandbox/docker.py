"""Sandbox backend on a Docker engine."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import tarfile
import time
import uuid
from contextlib import suppress
from datetime import datetime
from typing import Any

from harness_bridges.engine import FileState, ShellResult
from harness_bridges.errors import ConfigError
from rollout_adapters.sandbox.config import UID, WORK, SandboxConfig, refused_command

HOST_IMAGE = "camp-plugin-host:1"
KEEPER_SECONDS = 24 * 3600
"""A keeper whose trainer died goes by itself, and the workspace's memory with it."""
DEADLINE_SLACK = 15
"""Seconds after a command's own limit at which its container is killed from outside."""
# The command's output goes to a file of limited size, so that a process that stays behind, or
# that ignores closed pipes, cannot hold the container open. This shell is process 1 of its
# namespace: no signal from inside ends it, and `kill -9 -1` ends all others. The engine stores
# output by lines, a hundred bytes each: base64 has one. An earlier command may have locked itself
# out of the workspace.
RUN = """
exec 2>/dev/null
chmod 755 "$HOME"
timeout -s KILL "$1" bash -c "$2" </dev/null >/out/log 2>&1; code=$?
kill -9 -1
head -c "$3" /out/log | base64 -w 0
exit $code
"""
LOOK = """
p=$1; q=$1
while q=$(dirname "$q"); [ "$q" != . ]; do [ -L "$q" ] && { echo missing; exit; }; done
if [ -L "$p" ]; then echo 'symbolic link'
elif [ ! -e "$p" ]; then echo missing
elif [ -d "$p" ]; then echo directory
elif [ ! -f "$p" ]; then echo 'special file'
else echo file; stat -c '%i %z' "$p"; head -c "$2" "$p"; fi
"""


class DockerBackend:
    """One engine.

    Raises:
        ConfigError: the Docker SDK is missing, no engine answers, or it lacks the image.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        try:
            import docker
        except ModuleNotFoundError:
            raise ConfigError("camp_sandbox=docker: `pip install docker` first") from None
        try:
            # A pool as large as any concurrency that a rollout uses.
            self.client: Any = docker.from_env(timeout=60, max_pool_size=64)
            self.client.ping()
        except docker.errors.DockerException as error:
            raise ConfigError(
                f"camp_sandbox=docker: no engine answers ({error}); start one, set DOCKER_HOST, "
                "or use bubblewrap"
            ) from None
        self.binds: dict[str, dict[str, str]] = {}
        self.image = config.sandbox_image
        if self.image == "host":
            self._use_host_image()
        try:
            self.client.images.get(self.image)
        except docker.errors.ImageNotFound:
            raise ConfigError(
                f"sandbox_image={self.image!r}: the engine does not have it; `docker pull` it"
            ) from None

    def _use_host_image(self) -> None:
        self.image = HOST_IMAGE
        self.binds = {path: {"bind": path, "mode": "ro"} for path in ("/usr", "/etc/alternatives")}
        if not self.client.images.list(HOST_IMAGE):
            repository, tag = HOST_IMAGE.split(":")
            self.client.api.import_image_from_data(_host_image(), repository=repository, tag=tag)

    async def open(self) -> DockerShell:
        """A new workspace."""
        return await asyncio.to_thread(DockerShell, self)

    def container(self, volume: str, command: list[str], **more: Any) -> Any:
        """A confined container with the workspace, not started yet."""
        config = self.config
        disk = f"size={config.sandbox_disk_mib}m"
        out = f"size={2 * config.sandbox_output_bytes + 65536}"
        tmpfs = {"/tmp": disk, "/out": f"{out},uid={UID},mode=0700"}
        return self.client.containers.create(
            self.image,
            command,
            labels={"camp_plugin": "sandbox"},
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            read_only=True,
            user=f"{UID}:{UID}",
            working_dir=WORK,
            environment={"HOME": WORK, "PATH": "/usr/local/bin:/usr/bin:/bin"},
            pids_limit=config.sandbox_processes + 2,  # process 1 and `timeout` are ours
            mem_limit=f"{config.sandbox_memory_mib}m",
            memswap_limit=f"{config.sandbox_memory_mib}m",
            tmpfs=tmpfs,
            volumes={volume: {"bind": WORK, "mode": "rw,nocopy"}, **self.binds},
            log_config={
                "type": "json-file",
                "config": {"max-size": f"{8 * config.sandbox_output_bytes}", "max-file": "1"},
            },
            **more,
        )


class DockerShell:
    """One episode's workspace: a tmpfs volume, kept by a container that only waits.

    Each command runs in a fresh container; when it ends, all its processes end.
    """

    def __init__(self, backend: DockerBackend) -> None:
        config = backend.config
        self.backend, self.config = backend, config
        self.volume = f"camp-{uuid.uuid4().hex}"
        options = f"size={config.sandbox_disk_mib}m,nr_inodes={config.sandbox_files},uid={UID}"
        self._made = backend.client.volumes.create(
            self.volume,
            driver="local",
            driver_opts={"type": "tmpfs", "device": "tmpfs", "o": f"{options},gid={UID}"},
            labels={"camp_plugin": "sandbox"},
        )
        try:
            wait = ["sleep", str(KEEPER_SECONDS)]
            self.keeper = backend.container(self.volume, wait, auto_remove=True)
            self.keeper.start()
        except Exception:
            self._made.remove(force=True)
            raise

    async def run(self, command: str) -> ShellResult:
        if refused := refused_command(command):
            return refused
        return await asyncio.to_thread(self._run, command)

    def _run(self, command: str) -> ShellResult:
        config = self.config
        most = config.sandbox_output_bytes
        arguments = [str(config.sandbox_seconds), command, str(most + 1)]
        box = self.backend.container(self.volume, ["bash", "-c", RUN, "bash", *arguments])
        try:
            box.start()
            code = _wait(box, config.sandbox_seconds + DEADLINE_SLACK)
            # A command can write here past the shell; what is no base64 is its own loss.
            output = base64.b64decode(_whole(box.logs(stdout=True, stderr=False)))
            box.reload()
            state = box.attrs["State"]
        finally:
            box.remove(force=True)
        limit = ""
        if len(output) > most:
            limit, code = "output bytes", 137
        elif code in (124, 137) and _seconds(state) >= config.sandbox_seconds:
            limit, code = "seconds", 124
        text = output[:most].decode(errors="replace")
        return ShellResult(output=text, exit_code=code, limit=limit)

    async def look(self, path: str, limit: int) -> FileState:
        return await asyncio.to_thread(self._look, path, limit)

    def _look(self, path: str, limit: int) -> FileState:
        # The workspace's files cannot make this wait: a pipe or a device is never opened.
        command = ["bash", "-c", LOOK, "bash", path, str(limit + 1)]
        _, output = self.keeper.exec_run(command, workdir=WORK, stderr=False)
        kind, _, rest = output.partition(b"\n")
        if kind != b"file":
            return FileState(kind.decode() or "missing")
        changed, _, content = rest.partition(b"\n")
        return FileState("file", content, changed.decode())

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        import docker

        with suppress(docker.errors.NotFound):
            self.keeper.remove(force=True)
        for _ in range(50):
            try:
                self._made.remove(force=True)
                return
            except docker.errors.APIError as error:
                if error.status_code != 409:
                    raise
            time.sleep(0.1)  # the engine has not let go of the keeper yet


def _whole(encoded: bytes) -> bytes:
    """Without what is no base64, and without an incomplete end."""
    kept = re.sub(rb"[^A-Za-z0-9+/]", b"", encoded)
    kept = kept[: len(kept) - (len(kept) % 4 == 1)]
    return kept + b"=" * (-len(kept) % 4)


def _wait(box: Any, seconds: float) -> int:
    """The exit code; a container that outlives its deadline is killed."""
    import requests

    try:
        return int(box.wait(timeout=seconds)["StatusCode"])
    except (requests.exceptions.ReadTimeout, requests.exceptions.ConnectionError):
        box.kill()
        return 137


def _seconds(state: dict[str, str]) -> float:
    # The engine writes nanoseconds, which Python does not read.
    start, stop = (
        datetime.fromisoformat(state[key][:19]).timestamp() + float(f"0{state[key][19:-1] or '.0'}")
        for key in ("StartedAt", "FinishedAt")
    )
    return stop - start


def _host_image() -> bytes:
    """A root file system without a file: directories, and links into `/usr`."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("usr", "etc", "etc/alternatives", "tmp", "out", "proc", "dev", "sys", "work"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
    return data.getvalue()
