"""SsdTier: blocks in one LMDB file of fixed size, found again after a restart.

A block is two records written in one transaction: its bytes as they lie in the arena (one copy, made by LMDB without
the GIL) and an index entry (checksum, length, sequence number of the write), so that a restart adopts what is there
without touching the blocks. Reads go past the map (cache/ssd_read.py) and verify the checksum; a damaged block is
dropped and a miss.

Room is made before the file is full: LMDB reuses freed pages two transactions later, and large blocks need runs. Small
blocks share a transaction, large ones gain nothing from that. A thread syncs in the background, which bounds what
a failing power supply takes; a killed process loses nothing that was written.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Any, cast

import lmdb

from cache.arena import Buffer, checksum
from cache.block import KEY_BYTES, BlockKey
from cache.claim import SsdError
from cache.policy import LRU, EvictionPolicy
from cache.ssd_file import SsdFile
from cache.ssd_read import ValueReader

__all__ = ["SsdError", "SsdTier"]

log = logging.getLogger(__name__)

FILL = 0.8  # share of the map that blocks may take
SMALL_BYTES = 256 << 10  # blocks written in one transaction have so many bytes together
SPARE_BLOCKS = 3  # at least this room stays for pages that are freed but not yet reusable
TREE_BYTES = 512  # of both trees, per block: generous
ENTRY = Struct("<QQQ")  # index entry: checksum, length, sequence
ROW = (KEY_BYTES, ENTRY.size)


class SsdTier:
    """Blocks of at most `slot_bytes` in `directory`, at most `map_bytes` on disk.

    Everything blocks except `contains`, `all_keys`, `touch` and `stats`. Any thread may call those, `get` and `sync`;
    the rest belongs to one thread of the owner. Raises SsdError at construction; later trouble is counted, logged, and
    a miss.
    """

    def __init__(
        self,
        directory: str | Path,
        slot_bytes: int,
        map_bytes: int,
        root: bytes,
        policy: EvictionPolicy | None = None,
        sync_ms: int = 1000,
    ) -> None:
        """`sync_ms`: what has been written is synced so often; 0: each put, before it returns."""
        self.directory = Path(directory)
        self.slot_bytes = slot_bytes
        self.map_bytes = map_bytes - map_bytes % os.sysconf("SC_PAGE_SIZE")
        self.capacity = _capacity(slot_bytes, self.map_bytes)
        if self.capacity < 1:
            raise SsdError(f"--ssd-bytes {map_bytes} is too small for blocks of {slot_bytes} bytes: raise it")
        self._policy: EvictionPolicy = LRU() if policy is None else policy
        self._keys: set[BlockKey] = set()
        self._lock = threading.Lock()  # over _keys and _policy, for moments only
        self._sequence = 0
        self._counts = dict.fromkeys(("hits", "misses", "writes", "evictions", "corrupt", "failures"), 0)
        self._file = SsdFile(self.directory, self.map_bytes, slot_bytes, root)
        try:
            self._adopt()
        except lmdb.Error as error:
            log.warning("%s is damaged (%s): starting it empty", self.directory, error)
            self._file.renew()
        self._file.opened()
        self._env = self._file.env
        self._reader = ValueReader(self._file.path)
        self._sync_s = sync_ms / 1000
        self._batch = max(1, min(64, SMALL_BYTES // slot_bytes, self.capacity // 8))
        self._stop = threading.Event()
        self._written = threading.Event()
        self._syncer = threading.Thread(target=self._sync_loop, name="ssd-sync", daemon=True)
        self._syncer.start()

    def _adopt(self) -> None:
        """Take over what earlier lives wrote, oldest first. Walks both trees, though not the blocks. Raises
        lmdb.Error when they are damaged; a tree can be so in ways that end the process."""
        self._file.check_writable()
        with self._file.env.begin() as txn:
            blocks = set(txn.cursor(db=self._file.blocks).iternext(keys=True, values=False))
            rows = [(key, entry) for key, entry in txn.cursor(db=self._file.index) if key in blocks]
        entries = [(ENTRY.unpack(entry)[2], key) for key, entry in rows if (len(key), len(entry)) == ROW]
        for sequence, key in sorted(entries):
            self._keys.add(key)
            self._policy.added(key)
            self._sequence = sequence + 1

    # --- blocks

    def contains(self, key: BlockKey) -> bool:
        return key in self._keys

    def all_keys(self) -> list[BlockKey]:
        """All blocks here, in no order."""
        with self._lock:
            return list(self._keys)

    def touch(self, key: BlockKey) -> None:
        """A hit in a tier above: keep this copy from aging meanwhile."""
        with self._lock:
            if key in self._keys:
                self._policy.touched(key)

    def put(self, key: BlockKey, memory: Buffer, block_checksum: int) -> bool:
        """Write one block of 1 to `slot_bytes` bytes; True when it is here afterwards. The memory must not change
        meanwhile. The checksum is stored as given: a block that was already bad is found out at its next read."""
        return self.put_many([(key, memory, block_checksum)])[0]

    def put_many(self, rows: Sequence[tuple[BlockKey, Buffer, int]]) -> list[bool]:
        """The same for several blocks, with one sync where each put is synced."""
        for _, memory, _ in rows:
            if not 0 < len(memory) <= self.slot_bytes:
                raise ValueError(f"a block of {len(memory)} bytes, this tier has at most {self.slot_bytes}")
        done: list[bool] = []
        step = self._batch
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            if len(some) == 1 or not self._put_together(some):
                done += [self._put(*row) for row in some]
            else:
                done += [True] * len(some)
        if self._sync_s or not any(done):
            return done
        return done if self.sync() else [False] * len(done)

    def _put_together(self, rows: Sequence[tuple[BlockKey, Buffer, int]]) -> bool:
        """In one transaction; False when that cannot be, and then nothing was written."""
        new = {key: (memory, found) for key, memory, found in rows if key not in self._keys}
        self._make_room(self.capacity - len(new))
        try:
            with self._env.begin(write=True) as txn:
                for key, (memory, block_checksum) in new.items():
                    txn.put(key, memory, db=self._file.blocks)
                    txn.put(key, ENTRY.pack(block_checksum, len(memory), self._sequence), db=self._file.index)
                    self._sequence += 1
        except (lmdb.Error, OSError):
            return False
        for key in new:
            self._exchange(None, key)
        return True

    def _put(self, key: BlockKey, memory: Buffer, block_checksum: int) -> bool:
        if key in self._keys:
            return True
        entry = ENTRY.pack(block_checksum, len(memory), self._sequence)
        self._sequence += 1
        for _ in range(1 + SPARE_BLOCKS):
            self._make_room(self.capacity)
            victim = self._victim() if len(self._keys) == self.capacity else None
            try:
                with self._env.begin(write=True) as txn:
                    if victim is not None:
                        self._erase(txn, victim)
                    txn.put(key, memory, db=self._file.blocks)
                    txn.put(key, entry, db=self._file.index)
            except lmdb.MapFullError as error:
                reason: Exception = error
                self._make_room(len(self._keys) - 1)  # its pages come free a transaction later: try again
            except (lmdb.Error, OSError) as error:
                reason = error
                break
            else:
                self._exchange(victim, key)
                return True
        self._failed("write", reason)
        return False

    def get(self, key: BlockKey, into: Buffer) -> tuple[int, int] | None:
        """Copy a block into `into` (slot_bytes, writable); returns its checksum, verified there, and its length. None
        is a miss; `into` may then hold anything."""
        if key not in self._keys:
            self._counts["misses"] += 1
            return None
        try:
            with self._env.begin(buffers=True) as txn:
                stored = txn.get(key, db=self._file.blocks)
                entry = txn.get(key, db=self._file.index)
                found = self._copy_checked(stored, entry, into)
        except (lmdb.Error, OSError) as error:
            self._failed("read", error)
            found = None
        if found is None:
            if key not in self._keys:  # evicted meanwhile, by the thread that writes
                self._counts["misses"] += 1
                return None
            self._counts["corrupt"] += 1
            log.warning("block %s in %s is damaged: dropped", key.hex(), self.directory)
            self.delete(key)
            return None
        self._counts["hits"] += 1
        self.touch(key)
        return found

    def delete(self, key: BlockKey) -> bool:
        """False when it was not here."""
        if key not in self._keys:
            return False
        self._forget(key)
        try:
            with self._env.begin(write=True) as txn:
                self._erase(txn, key)
        except (lmdb.Error, OSError) as error:
            self._failed("delete", error)
        return True

    def _erase(self, txn: Any, key: BlockKey) -> None:
        txn.delete(key, db=self._file.blocks)
        txn.delete(key, db=self._file.index)

    def _forget(self, key: BlockKey) -> None:
        with self._lock:
            self._keys.discard(key)
            self._policy.removed(key)

    def _exchange(self, victim: BlockKey | None, key: BlockKey) -> None:
        if victim is not None:
            self._forget(victim)
            self._counts["evictions"] += 1
        with self._lock:
            self._keys.add(key)
            self._policy.added(key)
        self._counts["writes"] += 1
        self._written.set()

    def _victim(self) -> BlockKey:
        with self._lock:
            return cast(BlockKey, self._policy.victim())

    def _make_room(self, most: int) -> None:
        while len(self._keys) > max(0, most):
            self.delete(self._victim())
            self._counts["evictions"] += 1

    def _failed(self, what: str, error: Exception) -> None:
        """Count it; log it at powers of two, so that a dead disk does not fill the log."""
        self._counts["failures"] = count = self._counts["failures"] + 1
        if count & (count - 1) == 0:
            log.warning("SSD tier %s: %s failed (%d failures so far): %s", self.directory, what, count, error)

    def _copy_checked(self, stored: Buffer | None, entry: Buffer | None, into: Buffer) -> tuple[int, int] | None:
        """Checksum and length of what is in `into` afterwards; None when it is not what was written."""
        if stored is None or entry is None or len(entry) != ENTRY.size:
            return None
        wanted, length, _ = ENTRY.unpack(entry)
        if not 0 < len(stored) == length <= len(into):
            return None
        target = memoryview(into)[:length]
        self._reader.read(memoryview(stored), target)
        return (wanted, length) if checksum(target) == wanted else None

    # --- life

    def sync(self) -> bool:
        """Everything written so far is on disk when this returns True."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            self._failed("sync", error)
            return False
        return True

    def stats(self) -> dict[str, int]:
        return {
            "blocks": len(self._keys),
            "capacity": self.capacity,
            "bytes": len(self._keys) * self.slot_bytes,
            "map_bytes": self.map_bytes,
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
        self._reader.close()
        self._file.close()


def _capacity(slot_bytes: int, map_bytes: int) -> int:
    """How many blocks fit safely."""
    page = os.sysconf("SC_PAGE_SIZE")
    if slot_bytes < page // 2:
        cost = min(page, 4 * (slot_bytes + KEY_BYTES)) + TREE_BYTES  # inside leaves, which LMDB merges below 25 %
    else:
        cost = -(-(slot_bytes + 16) // page) * page + TREE_BYTES  # a run of pages behind a 16-byte header
    usable = map_bytes - 16 * page
    return min(int(FILL * usable) // cost, usable // cost - SPARE_BLOCKS)
