"""Control groups for one command, version 1 or 2, where this process may make them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from rollout_adapters.sandbox.config import SandboxConfig

ROOT = Path("/sys/fs/cgroup")
SWAP = "memory.swap.max"


class Cgroup:
    """Limits on memory and processes that hold for all of a command's processes together."""

    def __init__(self, directories: list[Path]) -> None:
        self.directories = directories

    @classmethod
    def make(cls, name: str, config: SandboxConfig) -> Cgroup:
        """Make the groups; one without directories, and so without effect, if we may not."""
        group = cls([])
        try:
            for directory, limits in _limits(name, config):
                directory.mkdir()
                group.directories.append(directory)
                for file, value in limits.items():
                    if file == SWAP and not (directory / file).exists():
                        continue  # a kernel that does not count swap
                    (directory / file).write_text(str(value))
        except OSError:
            group.remove()
            return cls([])
        return group

    def enter(self) -> str:
        """Shell code with which a process puts itself into the groups."""
        return "".join(f"echo $$ > {d}/cgroup.procs && " for d in self.directories)

    async def close(self) -> None:
        """Kill what is left inside and remove the groups."""
        for _ in range(100):
            for directory in self.directories:
                for pid in (directory / "cgroup.procs").read_text().split():
                    try:
                        os.kill(int(pid), signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            self.remove()
            if not self.directories:
                return
            await asyncio.sleep(0.02)

    def remove(self) -> None:
        """Remove the groups that are empty."""
        left = []
        for directory in self.directories:
            try:
                directory.rmdir()
            except OSError:
                left.append(directory)  # its processes are not gone yet
        self.directories = left


def _limits(name: str, config: SandboxConfig) -> list[tuple[Path, dict[str, int]]]:
    memory = config.sandbox_memory_mib << 20
    # bwrap's own two processes are inside, too.
    pids = config.sandbox_processes + 2
    if (ROOT / "cgroup.controllers").exists():
        limits = {"memory.max": memory, SWAP: 0, "pids.max": pids}
        return [(ROOT / name, limits)]
    return [
        (ROOT / "memory" / name, {"memory.limit_in_bytes": memory}),
        (ROOT / "pids" / name, {"pids.max": pids}),
    ]
