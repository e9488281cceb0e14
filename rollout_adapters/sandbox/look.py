"""Look at a file of a workspace from outside, following no symbolic link."""

from __future__ import annotations

import os
import stat

from harness_bridges.engine import FileState

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def look(root: str, path: str, limit: int) -> FileState:
    """The state of `path` below the directory `root`, and its first `limit + 1` bytes."""
    *parents, name = path.split("/")
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            deeper = os.open(parent, _FLAGS | os.O_DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = deeper
        return _look(directory, name, limit)
    except FileNotFoundError:
        return FileState("missing")
    except OSError:
        # A directory on the way is a link, a file, or closed to us: `path` is not there.
        return FileState("missing")
    finally:
        os.close(directory)


def _look(directory: int, name: str, limit: int) -> FileState:
    about = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISLNK(about.st_mode):
        return FileState("symbolic link")
    if stat.S_ISDIR(about.st_mode):
        return FileState("directory")
    if not stat.S_ISREG(about.st_mode):
        return FileState("special file")
    file = os.open(name, _FLAGS, dir_fd=directory)
    with os.fdopen(file, "rb") as opened:
        content = opened.read(limit + 1)
    return FileState("file", content, f"{about.st_ino} {about.st_ctime_ns}")
