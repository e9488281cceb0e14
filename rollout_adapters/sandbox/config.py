"""Settings of the sandbox, the same for both backends."""

from __future__ import annotations

from dataclasses import dataclass, fields

from harness_bridges.engine import ShellResult
from harness_bridges.errors import ConfigError

BACKENDS = ("auto", "docker", "bubblewrap")
WORK = "/work"
"""Where a command finds its workspace."""
COMMAND_BYTES = 128 << 10
"""Linux takes no longer argument."""
UID = 1000
"""Who runs commands, inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """Limits of one episode's workspace and of each command in it. The network is always off."""

    camp_sandbox: str = "auto"
    """`docker`, `bubblewrap`, or `auto`: docker if an engine answers, else bubblewrap."""
    sandbox_image: str = "host"
    """Docker: an image that the engine has, with bash and coreutils. `host`: an empty
    one that shows the engine's machine's `/usr`, read-only."""
    sandbox_seconds: int = 30
    """Wall time of one command."""
    sandbox_output_bytes: int = 65536
    """Bytes of one command's output; a command that writes more is stopped."""
    sandbox_processes: int = 64
    """Processes and threads at once."""
    sandbox_memory_mib: int = 512
    """Memory of a command in MiB, what it writes to the workspace included."""
    sandbox_disk_mib: int = 64
    """Size of the workspace in MiB; it lives in memory. `/tmp` has as much again."""
    sandbox_files: int = 4096
    """Files and directories in the workspace."""

    def __post_init__(self) -> None:
        if self.camp_sandbox not in BACKENDS:
            raise ConfigError(
                f"camp_sandbox={self.camp_sandbox!r}: expected one of {', '.join(BACKENDS)}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{field.name}={value}: must be at least 1")


def refused_command(command: str) -> ShellResult | None:
    """What the policy is told of a command that the system cannot be given, else None."""
    if "\0" in command:
        return ShellResult(output="The command has a null byte.", exit_code=126)
    if len(command.encode(errors="replace")) >= COMMAND_BYTES:
        return ShellResult(
            output=f"The command has {COMMAND_BYTES} bytes or more; write a script in parts.",
            exit_code=126,
        )
    return None
