"""SsdTier: which blocks are on disk, who goes next, and what happens when the disk does not do what it should.

The books are in memory: an entry per block says where it lies and which checksum it has, so lookups and reads ask no
tree. A restart adopts what its medium finds, oldest first. Reads verify the checksum; a damaged block is dropped and a
miss. A medium that finds itself damaged is renewed, empty, while the node serves. A thread syncs in the background,
which bounds what a failing power supply takes; a killed process loses nothing that was written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from cache.arena import Buffer, checksum
from cache.block import BlockKey
from cache.policy import LRU, EvictionPolicy
from cache.ssd.claim import SsdError
from cache.ssd.lmdb_medium import LmdbMedium
from cache.ssd.medium import Damaged, Entry, Found, Full, Medium, New
from cache.ssd.slot_medium import SlotMedium

log = logging.getLogger(__name__)

TRIES = 4  # at a write for which the medium has no room: freed pages may be usable two writes later only

backends: dict[str, Callable[[Path, int, int, bytes], Medium]] = {"lmdb": LmdbMedium, "file": SlotMedium}
"""(directory, slot bytes, bytes on disk, root) -> medium; the registry behind --ssd-backend."""


class SsdTier:
    """Blocks of at most `slot_bytes` in `directory`, at most `nbytes` on disk.

    Everything blocks except `contains`, `all_keys`, `touch` and `stats`. Any thread may call those, `get` and `sync`;
    the rest belongs to one thread of the owner. Raises SsdError at construction; later trouble is counted, logged, and
    a miss.
    """

    def __init__(
        self,
        directory: str | Path,
        slot_bytes: int,
        nbytes: int,
        root: bytes,
        policy: EvictionPolicy | None = None,
        sync_ms: int = 1000,
        backend: str = "lmdb",
    ) -> None:
        """`sync_ms`: what has been written is synced so often; 0: each put, before it returns. `backend`: one of
        `backends`."""
        self.directory = Path(directory)
        self.slot_bytes = slot_bytes
        self.nbytes = nbytes
        self._policy: EvictionPolicy = LRU() if policy is None else policy
        self._entries: dict[BlockKey, Entry] = {}
        self._lock = threading.Lock()  # over _entries, _policy and _doomed, for moments only
        self._doomed: list[Found] = []  # on the medium, but no block of ours any more: erased with the next write
        self._counts = dict.fromkeys(("hits", "misses", "writes", "evictions", "corrupt", "failures", "renewals"), 0)
        self._medium: Medium = backends[backend](self.directory, slot_bytes, nbytes, root)
        self.capacity = self._medium.capacity
        blocks, self._doomed = self._medium.adopt()
        for key, entry in blocks:
            self._enter(key, entry)
        self._syncing = threading.Lock()  # a medium is not renewed while it is synced
        self._sync_s = sync_ms / 1000
        self._stop = threading.Event()
        self._written = threading.Event()
        self._syncer = threading.Thread(target=self._sync_loop, name="ssd-sync", daemon=True)
        self._syncer.start()

    # --- what is here

    def contains(self, key: BlockKey) -> bool:
        return key in self._entries

    def content(self, key: BlockKey) -> tuple[int, int] | None:
        """(checksum, bytes) of a block here."""
        entry = self._entries.get(key)
        return None if entry is None else (entry.checksum, entry.length)

    def all_keys(self) -> list[BlockKey]:
        """All blocks here, in no order."""
        with self._lock:
            return list(self._entries)

    def touch(self, key: BlockKey) -> None:
        """A hit in a tier above: keep this copy from aging meanwhile."""
        with self._lock:
            if key in self._entries:
                self._policy.touched(key)

    # --- writing

    def put(self, key: BlockKey, memory: Buffer, block_checksum: int) -> bool:
        """Write one block of 1 to `slot_bytes` bytes; True when it is here afterwards. The memory must not change
        meanwhile. The checksum is stored as given: a block that was already bad is found out at its next read."""
        return self.put_many([(key, memory, block_checksum)])[0]

    def put_many(self, rows: Sequence[New]) -> list[bool]:
        """The same for several blocks, with one sync where each put is synced."""
        for _, memory, _ in rows:
            if not 0 < len(memory) <= self.slot_bytes:
                raise ValueError(f"a block of {len(memory)} bytes, this tier has at most {self.slot_bytes}")
        done: list[bool] = []
        step = self._medium.batch
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            if len(some) > 1 and self._put(some):
                done += [True] * len(some)
            else:
                done += [self._put([row]) for row in some]
        if self._sync_s or not any(done):
            return done
        return done if self.sync() else [False] * len(done)

    def _put(self, rows: Sequence[New]) -> bool:
        """All of them or none."""
        new = list({row[0]: row for row in rows if row[0] not in self._entries}.values())
        if not new:
            return True
        victims = self._take_victims(len(self._entries) + len(new) - self.capacity)
        doomed = self._take_doomed()
        try:
            entries = self._write(new, victims + doomed)
        except (Full, OSError) as error:
            with self._lock:
                self._doomed += doomed
            for key, entry in victims:
                self._enter(key, entry)
            self._failed("write", error)
            return False
        except Damaged as error:
            self._renew(error)
            return False
        for (key, _, _), entry in zip(new, entries, strict=True):
            self._enter(key, entry)
        self._counts["writes"] += len(new)
        self._counts["evictions"] += len(victims)
        self._written.set()
        return True

    def _write(self, new: Sequence[New], erase: Sequence[Found]) -> list[Entry]:
        """Raises Full, Damaged, OSError; then nothing was written."""
        for _ in range(TRIES - 1):
            try:
                return self._medium.write(new, erase)
            except Full:
                more = self._take_victims(1)
                self._medium.erase(more)
                self._counts["evictions"] += len(more)
        return self._medium.write(new, erase)

    def delete(self, key: BlockKey) -> bool:
        """False when it was not here."""
        with self._lock:
            entry = self._leave(key)
        if entry is None:
            return False
        try:
            self._medium.erase([(key, entry)])
        except Damaged as error:
            self._renew(error)
        except (Full, OSError) as error:
            self._failed("delete", error)
            with self._lock:
                self._doomed.append((key, entry))
        return True

    def _take_victims(self, count: int) -> list[Found]:
        """The next `count` blocks to go leave the books."""
        taken: list[Found] = []
        with self._lock:
            while len(taken) < count and len(self._policy):
                key = cast(BlockKey, self._policy.victim())
                entry = self._leave(key)
                if entry is not None:
                    taken.append((key, entry))
        return taken

    def _take_doomed(self) -> list[Found]:
        with self._lock:
            doomed, self._doomed = self._doomed, []
        return doomed

    def _enter(self, key: BlockKey, entry: Entry) -> None:
        with self._lock:
            self._entries[key] = entry
            self._policy.added(key)

    def _leave(self, key: BlockKey) -> Entry | None:
        """Out of the books; the caller has the lock."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._policy.removed(key)
        return entry

    # --- reading

    def get(self, key: BlockKey, into: Buffer) -> tuple[int, int] | None:
        """Copy a block into `into` (slot_bytes, writable); returns its checksum, verified there, and its length. None
        is a miss; `into` may then hold anything."""
        entry = self._entries.get(key)
        if entry is None or entry.length > len(into):
            self._counts["misses"] += 1
            return None
        target = memoryview(into)
        try:
            self._medium.read(entry, target)
            good = checksum(target[: entry.length]) == entry.checksum
        except OSError as error:
            self._failed("read", error)
            good = False
        if good:
            self._counts["hits"] += 1
            self.touch(key)
            return entry.checksum, entry.length
        with self._lock:
            ours = self._entries.get(key) is entry
            if ours:
                self._leave(key)
                self._doomed.append((key, entry))
        if not ours:  # evicted meanwhile, by the thread that writes, and written over
            self._counts["misses"] += 1
            return None
        self._counts["corrupt"] += 1
        log.warning("block %s in %s is damaged: dropped", key.hex(), self.directory)
        return None

    # --- trouble

    def _renew(self, error: Damaged) -> None:
        """Start empty, and go on serving."""
        log.warning("%s is damaged (%s): starting it empty", self.directory, error)
        with self._lock:
            for key in list(self._entries):
                self._leave(key)
            self._doomed.clear()
        self._counts["renewals"] += 1
        try:
            with self._syncing:
                self._medium.renew()
        except (SsdError, OSError) as failure:
            self._failed("renewal", failure)

    def _failed(self, what: str, error: Exception) -> None:
        """Count it; log it at powers of two, so that a dead disk does not fill the log."""
        self._counts["failures"] = count = self._counts["failures"] + 1
        if count & (count - 1) == 0:
            log.warning("SSD tier %s: %s failed (%d failures so far): %s", self.directory, what, count, error)

    # --- life

    def sync(self) -> bool:
        """Everything written so far is on disk when this returns True."""
        try:
            with self._syncing:
                self._medium.sync()
        except OSError as error:
            self._failed("sync", error)
            return False
        return True

    def stats(self) -> dict[str, int]:
        return {
            "blocks": len(self._entries),
            "capacity": self.capacity,
            "bytes": len(self._entries) * self.slot_bytes,
            "map_bytes": self.nbytes,
        } | self._counts

    def _sync_loop(self) -> None:
        while self._sync_s and not self._stop.wait(self._sync_s):
            if self._written.is_set():
                self._written.clear()
                self.sync()

    def close(self) -> None:
        """Sync and give the directory back. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._syncer.join()
        self._medium.close()
