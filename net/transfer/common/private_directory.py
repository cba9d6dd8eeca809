"""PrivateDirectory: a temporary directory of one process; later processes remove it if its owner was killed.

The owner holds a lock on the directory; the kernel releases it when the process ends for any reason. Before a process
creates a new directory, it removes all unlocked ones of this user, so directories of killed nodes do not remain.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "mooncake-run-"


class PrivateDirectory:
    """`path`, mode 0700, for this user only. Raises OSError if it cannot be created."""

    def __init__(self, prefix: str = PREFIX) -> None:
        sweep(Path(tempfile.gettempdir()), prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            lock = _lock(self.path)
            if lock is not None:
                self._lock = lock
                return

    def close(self) -> None:
        """Remove the directory. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path, prefix: str = PREFIX) -> int:
    """Remove the directories of dead processes in `parent`; returns their number."""
    removed = 0
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in [one for one in entries if one.name.startswith(prefix) and one.is_dir(follow_symlinks=False)]:
            lock = _lock(Path(entry.path))
            if lock is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)
                removed += 1
    return removed


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of `path`; None if another process holds it, or if the directory belongs to
    another user or is gone: another process may remove it between its creation and its locking."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.fstat(descriptor)
        if mine.st_uid == os.getuid() and os.path.samestat(mine, path.stat(follow_symlinks=False)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
