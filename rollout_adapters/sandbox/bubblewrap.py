"""Sandbox backend without a daemon: namespaces, `bwrap`, control groups and resource limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import uuid

from harness_bridges.engine import FileState, ShellResult
from harness_bridges.errors import ConfigError
from rollout_adapters.sandbox.cgroup import Cgroup
from rollout_adapters.sandbox.config import UID, WORK, SandboxConfig, refused_command
from rollout_adapters.sandbox.look import look

NOBODY = 65534
OPEN_FILES = 256


class BubblewrapShell:
    """One episode's workspace: a tmpfs in a mount namespace that a waiting process holds.

    Each command gets namespaces of its own (processes, network, mounts, users) with the workspace
    and a read-only `/usr`; when it ends, all its processes end.
    """

    def __init__(
        self, config: SandboxConfig, holder: asyncio.subprocess.Process, directory: str
    ) -> None:
        self.config, self._holder, self._directory = config, holder, directory

    @classmethod
    async def open(cls, config: SandboxConfig) -> BubblewrapShell:
        """Mount the workspace.

        Raises:
            ConfigError: the machine does not let us make namespaces.
        """
        directory = tempfile.mkdtemp(prefix="camp-")
        os.chmod(directory, 0o755)
        options = f"size={config.sandbox_disk_mib}m,nr_inodes={config.sandbox_files},mode=0755"
        # It waits on its standard input: should we die, that closes and the workspace is gone.
        script = f"mount -t tmpfs -o {options} tmpfs {directory} && echo ready && exec cat"
        try:
            holder = await asyncio.create_subprocess_exec(
                *_unprivileged(),
                *("unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"),
                *("sh", "-c", script),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            os.rmdir(directory)
            raise
        shell = cls(config, holder, directory)
        try:
            assert holder.stdout is not None
            line = (await holder.stdout.readline()).decode().strip()
            if line != "ready":
                raise ConfigError(
                    f"camp_sandbox=bubblewrap: cannot mount a workspace on {directory} ({line}); "
                    "allow unprivileged user namespaces and let everybody search the directories "
                    "above it (TMPDIR), or use docker"
                )
        except BaseException:  # also if the episode is cancelled
            await shell.close()
            raise
        return shell

    async def run(self, command: str) -> ShellResult:
        if refused := refused_command(command):
            return refused
        group = Cgroup.make(f"camp-{uuid.uuid4().hex}", self.config)
        try:
            output, limit, code = await self._run(command, group)
        finally:
            await group.close()
        if limit:
            code = 124 if limit == "seconds" else 137
        return ShellResult(
            output=output.decode(errors="replace"),
            exit_code=code if code >= 0 else 137,
            limit=limit,
        )

    async def _run(self, command: str, group: Cgroup) -> tuple[bytes, str, int]:
        """Output, the limit that stopped it or nothing, and exit code."""
        arguments = self._arguments(command, memory_in_group=bool(group.directories))
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", f'{group.enter()}exec "$@"', "sh", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        )
        try:
            output, limit = await self._read(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            while await process.stdout.read(65536):
                pass  # what is still in the pipe; asyncio waits for its end
            code = await process.wait()
        return output, limit, code

    async def _read(self, process: asyncio.subprocess.Process) -> tuple[bytes, str]:
        """The output up to its end or a limit, and which limit that was."""
        assert process.stdout is not None
        most = self.config.sandbox_output_bytes
        output = bytearray()
        try:
            async with asyncio.timeout(self.config.sandbox_seconds):
                while chunk := await process.stdout.read(65536):
                    output += chunk
                    if len(output) > most:
                        return bytes(output[:most]), "output bytes"
        except TimeoutError:
            return bytes(output), "seconds"
        return bytes(output), ""

    def _arguments(self, command: str, *, memory_in_group: bool) -> list[str]:
        config = self.config
        disk = config.sandbox_disk_mib << 20
        limits = [f"--nproc={config.sandbox_processes}", f"--fsize={disk}", "--core=0"]
        limits += [f"--nofile={OPEN_FILES}"]
        if not memory_in_group:
            limits.append(f"--as={config.sandbox_memory_mib << 20}")
        return [
            *_unprivileged(),
            *("nsenter", f"--target={self._holder.pid}", "--user", "--mount"),
            *("--preserve-credentials", "--wdns=/"),
            # An earlier command may have locked itself out.
            *("sh", "-c", 'chmod 755 "$0" && exec "$@"', self._directory),
            *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
            *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
            *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
            *("--proc", "/proc", "--dev", "/dev", "--size", str(disk), "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev", "--size", str(disk), "--tmpfs", "/tmp"),
            *("--bind", self._directory, WORK, "--chdir", WORK, "--remount-ro", "/"),
            *("--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox", "--clearenv"),
            *("--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", WORK),
            # Inside, so that the processes of this namespace are counted and no others.
            *("prlimit", *limits, "bash", "-c", command),
        ]

    async def look(self, path: str, limit: int) -> FileState:
        root = f"/proc/{self._holder.pid}/root{self._directory}"
        return await asyncio.to_thread(look, root, path, limit)

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._holder.kill()
        await self._holder.wait()
        os.rmdir(self._directory)


def _unprivileged() -> list[str]:
    """Root's files must not be ours inside the namespace: drop to nobody first."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
