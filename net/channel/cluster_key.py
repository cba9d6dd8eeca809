"""--cluster-key-file: the keyring from the current content of the file, so that keys are rotated without a restart."""

from __future__ import annotations

import logging
import stat
import time
from pathlib import Path

from net.channel.keyring import Keyring, parse

log = logging.getLogger("mooncake.net")

CHECK_PERIOD_S = 1.0  # between two checks of the file


class KeyFileError(Exception):
    """The key file cannot be used. The message is one line and names the remedy."""


class ClusterKey:
    """Raises KeyFileError at start. Later, an unreadable file is logged and leaves the keys unchanged.

    To rotate: add the new key as a second line on every node, then make it the first line on every node, then remove
    the old one. Open connections keep their own keys until they end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._ring = _load(path)
        self._check_at = time.monotonic() + CHECK_PERIOD_S
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("other users can read --cluster-key-file %s: run chmod 600 on it", path)

    def ring(self) -> Keyring:
        """The current keys; the file is checked at most once per second."""
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_PERIOD_S
            self._reload()
        return self._ring

    def _reload(self) -> None:
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._ring = _load(self._path)
            log.info(
                "reread the cluster keys: %d keys, the primary is %s", len(self._ring.keys), self._ring.primary.id.hex()
            )
        except KeyFileError as error:
            log.error("keeping the old cluster keys: %s", error)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise KeyFileError(f"--cluster-key-file {path}: {error.strerror}") from None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _load(path: Path) -> Keyring:
    try:
        return parse(path.read_text())
    except UnicodeDecodeError:
        raise KeyFileError(f"--cluster-key-file {path}: the file is not text") from None
    except OSError as error:
        raise KeyFileError(f"--cluster-key-file {path}: {error.strerror}") from None
    except ValueError as error:
        raise KeyFileError(f"--cluster-key-file {path}: {error}") from None
