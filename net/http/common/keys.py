"""API keys: --api-key and the current lines of --api-key-file.

Keys are kept as digests of equal length, and every check compares all of them. The time of a check therefore reveals
neither length, content nor position of a key.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

log = logging.getLogger("mooncake.http")

CHECK_PERIOD_S = 1.0  # between two checks of the file
MIN_CHARS = 8
"""Of a key in the file; a shorter line is probably a mistake."""


class ApiKeyFileError(Exception):
    """The file cannot be used. The message is one line and names the remedy."""


class ApiKeys:
    """The API keys. Raises ApiKeyFileError at start; later, an unreadable file is logged and leaves the keys unchanged.
    The file contains one key per line; empty lines and lines that begin with # are skipped."""

    def __init__(
        self, key: str | None = None, path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._own = () if key is None else (_digest(key),)
        self._path = path
        self._clock = clock
        self._stamp = None if path is None else _stamp(path)
        self._filed = () if path is None else _read(path)
        self._check_at = clock() + CHECK_PERIOD_S

    def __bool__(self) -> bool:
        """Whether clients must send a key."""
        return bool(self._own) or self._path is not None

    def owner(self, given: str) -> bytes | None:
        """An identifier of the key, the same for all its requests; None for a wrong key."""
        digest = _digest(given)
        same = [hmac.compare_digest(digest, known) for known in (*self._own, *self._from_file())]
        return digest if any(same) else None

    def _from_file(self) -> tuple[bytes, ...]:
        if self._path is not None and self._clock() >= self._check_at:
            self._check_at = self._clock() + CHECK_PERIOD_S
            try:
                stamp = _stamp(self._path)
                if stamp != self._stamp:
                    self._stamp, self._filed = stamp, _read(self._path)
                    log.info("reread the API keys: %d keys", len(self._filed))
            except ApiKeyFileError as error:
                log.error("keeping the old API keys: %s", error)
        return self._filed


def key_to_send(key: str | None, path: Path | None) -> str | None:
    """The key that joining nodes and commands send: `key`, else the first key of the file. Raises ApiKeyFileError."""
    return key if key is not None or path is None else _lines(path)[0]


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ApiKeyFileError(f"--api-key-file {path}: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[bytes, ...]:
    return tuple(_digest(key) for key in _lines(path))


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ApiKeyFileError(f"--api-key-file {path} cannot be read: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ApiKeyFileError(f"--api-key-file {path} contains no key: write one key per line (openssl rand -hex 24)")
    if any(len(key) < MIN_CHARS or " " in key for key in keys):
        raise ApiKeyFileError(f"--api-key-file {path}: a key needs at least {MIN_CHARS} characters and no spaces")
    return keys
