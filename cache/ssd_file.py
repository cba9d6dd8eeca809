"""SsdFile: the LMDB file behind an SSD tier: set aside, opened by one process, refused or dropped when it is not ours.

The file gets its full size on disk at the first start, so a full disk shows then and not later as a broken mapping.
Writes go to the mapping without sync; `sync` may run beside them in another thread.

What belongs to somebody else (another database, another model) is refused and left alone. What is ours but cannot be
trusted (unreadable, or dirty when the machine went down) is dropped: it was a cache.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lmdb
import orjson

from cache.claim import Claim, SsdError

log = logging.getLogger(__name__)

VERSION = 1
UNREADABLE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
)


class SsdFile:
    """`directory`/data.mdb of `map_bytes` with three databases:

    tier    one record: version, root, slot size. Another root or size is refused, never reinterpreted
    blocks  key -> the block's bytes
    index   key -> what is known of the block

    Raises SsdError whose message names the remedy.
    """

    def __init__(self, directory: Path, map_bytes: int, slot_bytes: int, root: bytes) -> None:
        self.directory = directory
        self.map_bytes = map_bytes
        self.path = directory / "data.mdb"
        self._record = {"version": VERSION, "root": root.hex(), "slot_bytes": slot_bytes}
        self._claim = Claim(directory)
        try:
            self._settle()
            self._claim.begin()
            self.env = self._open()
        except BaseException:
            self._claim.close()
            raise

    def check_writable(self) -> None:
        """The list of free pages can be read. Raises lmdb.Error."""
        with self.env.begin(write=True) as txn:
            txn.put(b"opened", str(os.getpid()).encode(), db=self.tier)

    def opened(self) -> None:
        """Everything in it could be looked at. Raises SsdError."""
        self._claim.opened()

    def renew(self) -> None:
        """Start empty: what is there cannot be used. Raises SsdError."""
        self.env.close()
        self._drop()
        self.env = self._open()

    def close(self) -> None:
        """Sync and give the directory back."""
        try:
            self.env.sync(True)
            self.env.close()
            self._claim.end()
        except lmdb.Error as error:
            log.warning("%s: the last sync failed (%s)", self.path, error)
        finally:
            self._claim.close()

    def _settle(self) -> None:
        """Refuse or drop what is in the directory before anything is written to it; check that the rest fits."""
        if self.path.exists() and not self._claim.known:
            raise SsdError(f"{self.directory} holds a database that is not ours: give another --ssd-path")
        if self._claim.deadly:
            log.warning("%s: %d processes died opening it: starting it empty", self.directory, self._claim.attempts)
            self._drop()
        elif self._claim.known and not self._claim.trusted:
            log.warning("%s was open when the machine went down: starting it empty", self.directory)
            self._drop()
        size, on_disk = 0, 0
        if self.path.exists():
            status = self.path.stat()
            size, on_disk = status.st_size, status.st_blocks * 512
        if size > self.map_bytes:
            raise SsdError(
                f"{self.path} has {size} bytes and --ssd-bytes allows {self.map_bytes}: "
                "raise it, or delete the directory to start smaller"
            )
        disk = os.statvfs(self.directory)
        room = disk.f_bavail * disk.f_frsize
        if self.map_bytes - on_disk > room:
            raise SsdError(
                f"{self.directory} has {room} bytes of room and --ssd-bytes wants {self.map_bytes - on_disk}: "
                "lower it, or give another --ssd-path"
            )

    def _open(self) -> Any:
        fresh = not self.path.exists()
        try:
            try:
                env = self._open_map()
            except UNREADABLE as error:
                log.warning("%s cannot be read (%s): starting it empty", self.path, error)
                self._drop()
                env = self._open_map()
        except lmdb.Error as error:
            raise SsdError(f"cannot open {self.path} ({error}): give another --ssd-path or --ssd-bytes") from error
        try:
            self._set_aside()
            env.reader_check()  # a reader killed with its process would pin freed pages for ever
            self.tier, self.blocks, self.index = (env.open_db(name) for name in (b"tier", b"blocks", b"index"))
            self._check_record(env)
        except BaseException as error:
            env.close()
            if fresh:
                self._drop()  # an attempt that failed leaves no large file behind
            if isinstance(error, lmdb.Error):
                raise SsdError(f"cannot use {self.path} ({error}): delete the directory") from error
            raise
        return env

    def _open_map(self) -> Any:
        return lmdb.open(
            str(self.directory), map_size=self.map_bytes, max_dbs=3, writemap=True, sync=False, map_async=True
        )

    def _set_aside(self) -> None:
        """Every page of the map gets its place on disk; what is already there stays."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, self.map_bytes)
        except OSError as error:
            raise SsdError(
                f"cannot set {self.map_bytes} bytes aside in {self.directory} ({error.strerror}): lower --ssd-bytes"
            ) from error
        finally:
            os.close(fd)

    def _check_record(self, env: Any) -> None:
        with env.begin(write=True) as txn:
            stored = txn.get(b"tier", db=self.tier)
            if stored is None:
                txn.put(b"tier", orjson.dumps(self._record), db=self.tier)
            elif (theirs := orjson.loads(stored)) != self._record:
                raise SsdError(
                    f"{self.directory} holds KV of another model or layout ({theirs}, here it is {self._record}): "
                    "give this node its own --ssd-path, or delete the directory"
                )

    def _drop(self) -> None:
        for path in (self.path, self.directory / "lock.mdb"):
            path.unlink(missing_ok=True)
