"""Place: the directory of an SSD tier: its owner, its allowed files, and those that are dropped or refused.

A directory with foreign data (other files, another model, another backend) is refused and left unchanged. Own data that
cannot be trusted is dropped: it was a cache. All files get their full size on disk before they are used, so a full disk
is detected at startup.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import orjson
from xxhash import xxh3_64_hexdigest

from cache.ssd.claim import Claim, SsdError

log = logging.getLogger(__name__)

VERSION = 2
RECORD = "tier"
"""The file that describes the directory: version, backend, root, slot size, and a checksum of these."""

FILES = ("data.mdb", "lock.mdb", "slots", "table")
"""Files of all media: the first two belong to LMDB."""


class Place:
    """Exclusive use of `directory`. `files`: the medium's files, blocks first, with `nbytes` in total; `lasting`: they
    remain usable if the machine crashes during a write. Raises SsdError, whose message names the remedy."""

    def __init__(
        self,
        directory: Path,
        backend: str,
        files: Sequence[str],
        nbytes: int,
        *,
        root: bytes,
        slot_bytes: int,
        lasting: bool,
    ) -> None:
        self.directory = directory
        self.nbytes = nbytes
        self._record = {"version": VERSION, "backend": backend, "root": root.hex(), "slot_bytes": slot_bytes}
        self._files = [directory / name for name in files]
        self._claim = Claim(directory)
        try:
            self._judge(lasting)
            self._check_room()
            self.empty = not self._files[0].exists()  # no blocks of an earlier process
            self._write_record()
        except BaseException:
            self._claim.close()
            raise

    def opening(self) -> None:
        """Begin opening: until `opened`, damaged data may crash the process. Raises SsdError."""
        self._claim.begin()

    def opened(self) -> None:
        """End of opening: the data was read. Raises SsdError."""
        self._claim.opened()

    def close(self, *, clean: bool) -> None:
        """Release the directory; `clean`: all its data is on disk."""
        try:
            if clean:
                self._claim.end()
        finally:
            self._claim.close()

    def drop(self) -> None:
        """Delete all blocks."""
        for name in FILES:
            (self.directory / name).unlink(missing_ok=True)

    def set_aside(self, path: Path, nbytes: int) -> None:
        """Allocate disk space for every byte of the file; existing data stays. Raises SsdError."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SsdError(f"cannot write to {path} ({error.strerror}): give another --ssd-path") from error
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            raise SsdError(
                f"cannot reserve {nbytes} bytes in {self.directory} ({error.strerror}): lower --ssd-bytes"
            ) from error
        finally:
            os.close(fd)

    # --- its files

    def _judge(self, lasting: bool) -> None:
        there = any((self.directory / name).exists() for name in FILES)
        found = self._read_record()
        if there and found is None and not self._claim.known:
            raise SsdError(f"{self.directory} contains a foreign database: give another --ssd-path")
        if not there:
            return
        if found is None:
            log.warning(
                "%s: its record is damaged or has an older version; starting with an empty tier", self.directory
            )
            self.drop()
        elif found != self._record:
            self._refuse(found)
        elif self._claim.deadly:
            log.warning(
                "%s: %d processes died while opening it; starting with an empty tier",
                self.directory,
                self._claim.attempts,
            )
            self.drop()
        elif not self._claim.trusted and not lasting:
            log.warning("%s was open when the machine went down; starting with an empty tier", self.directory)
            self.drop()

    def _refuse(self, found: dict[str, object]) -> None:
        if found.get("backend") != self._record["backend"]:
            raise SsdError(
                f"{self.directory} holds a tier of --ssd-backend {found.get('backend')}: "
                "give that, or another --ssd-path, or delete the directory"
            )
        raise SsdError(
            f"{self.directory} holds KV of another model or layout ({found}, here it is {self._record}): "
            "give this node its own --ssd-path, or delete the directory"
        )

    def _read_record(self) -> dict[str, object] | None:
        """None if it is not valid."""
        try:
            found = orjson.loads((self.directory / RECORD).read_bytes())
            stored = found.pop("checksum")
        except (OSError, orjson.JSONDecodeError, AttributeError, KeyError):
            return None
        return dict(found) if stored == _checksum(found) else None

    def _write_record(self) -> None:
        path = self.directory / RECORD
        if self._read_record() == self._record:
            return
        record = orjson.dumps(self._record | {"checksum": _checksum(self._record)})
        fresh = path.with_suffix(".new")
        try:
            with open(fresh, "wb") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise SsdError(f"cannot write to {self.directory} ({error.strerror}): give one with room") from error

    def _check_room(self) -> None:
        size, on_disk = 0, 0
        for path in self._files:
            if path.exists():
                status = path.stat()
                size, on_disk = size + status.st_size, on_disk + status.st_blocks * 512
        if size > self.nbytes:
            raise SsdError(
                f"{self.directory} has {size} bytes and --ssd-bytes allows {self.nbytes}: "
                "raise it, or delete the directory to start smaller"
            )
        disk = os.statvfs(self.directory)
        room = disk.f_bavail * disk.f_frsize
        if self.nbytes - on_disk > room:
            raise SsdError(
                f"{self.directory} has {room} bytes of room and --ssd-bytes wants {self.nbytes - on_disk}: "
                "lower it, or give another --ssd-path"
            )


def _checksum(record: dict[str, object]) -> str:
    return xxh3_64_hexdigest(orjson.dumps(record, option=orjson.OPT_SORT_KEYS))
