"""Choose the backend and open workspaces."""

from __future__ import annotations

import asyncio
import shutil
import uuid
import warnings
from collections.abc import Awaitable, Callable

from harness_bridges.engine import Shell
from harness_bridges.errors import ConfigError
from rollout_adapters.sandbox.cgroup import Cgroup
from rollout_adapters.sandbox.config import SandboxConfig


class Sandbox:
    """Opens one workspace per episode; looks for a backend when the first one is asked for."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._open: Callable[[], Awaitable[Shell]] | None = None
        self._choosing = asyncio.Lock()

    async def open(self) -> Shell:
        """A new, empty workspace.

        Raises:
            ConfigError: no backend works here; the message says why and what to do.
        """
        async with self._choosing:
            if self._open is None:
                self._open = await asyncio.to_thread(self._choose)
        return await self._open()

    def _choose(self) -> Callable[[], Awaitable[Shell]]:
        problems = []
        for name, choose in (("docker", self._docker), ("bubblewrap", self._bubblewrap)):
            if self.config.camp_sandbox in ("auto", name):
                try:
                    return choose()
                except ConfigError as error:
                    problems.append(str(error))
        raise ConfigError("; ".join(problems))

    def _docker(self) -> Callable[[], Awaitable[Shell]]:
        from rollout_adapters.sandbox.docker import DockerBackend

        return DockerBackend(self.config).open

    def _bubblewrap(self) -> Callable[[], Awaitable[Shell]]:
        from rollout_adapters.sandbox.bubblewrap import BubblewrapShell

        tools = ("bwrap", "unshare", "nsenter", "prlimit", "setpriv", "mount")
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            raise ConfigError(
                f"camp_sandbox={self.config.camp_sandbox!r}: {', '.join(missing)} not found; "
                "install bubblewrap and util-linux"
            )
        group = Cgroup.make(f"camp-{uuid.uuid4().hex}", self.config)
        if not group.directories:
            warnings.warn(
                "camp_sandbox=bubblewrap: this process may not make control groups; "
                "sandbox_memory_mib and sandbox_processes hold for each process and user, not "
                "for a whole command: use docker where policies are not trusted",
                stacklevel=2,
            )
        group.remove()
        return lambda: BubblewrapShell.open(self.config)
