"""SsdTier: writes and reads blocks on disk, and handles the failures of the disk.

Its index (cache/ssd/index.py) is in memory, so lookups and reads search no tree. A restart adopts the blocks that the
medium finds, oldest first. Reads verify the checksum; a damaged block is dropped and counts as a miss. A damaged medium
is replaced by an empty one while the node serves; if that fails, the tier is closed and tries again. A background
thread syncs, which bounds the loss at a power failure; a killed process loses nothing that was written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cache.arena import Buffer, checksum
from cache.block import BlockKey
from cache.pool.policy import PLAIN, EvictionPolicy, Facts
from cache.ssd.claim import SsdError
from cache.ssd.health import Health
from cache.ssd.index import SsdIndex
from cache.ssd.lmdb_medium import LmdbMedium
from cache.ssd.medium import Damaged, Entry, Found, Full, Medium, New
from cache.ssd.slot_medium import SlotMedium

log = logging.getLogger(__name__)

WRITE_TRIES = 4  # tries of a write if the medium is full: freed pages may be usable only two writes later
RENEW_AGAIN_S = 1.0  # pause after a failed renewal; doubles each time ...
RENEW_AGAIN_MAX_S = 60.0  # ... up to this
READ_FAILURES = 3  # this many failures in a row mean that the whole disk fails
TEND_S = 1.0  # pause between two tries of failed operations

backends: dict[str, Callable[[Path, int, int, bytes], Medium]] = {"lmdb": LmdbMedium, "file": SlotMedium}
"""(directory, slot bytes, bytes on disk, root) -> medium; the registry behind --ssd-backend."""


class SsdTier:
    """Blocks of at most `slot_bytes` in `directory`, at most `nbytes` on disk.

    Everything blocks except `contains`, `facts`, `all_keys`, `kept_keys`, `touch`, `forget`, `hold`, `unhold` and
    `stats`. Any thread may call those, `get`, `read_part` and `sync`; the rest belongs to one thread of the owner.
    Raises SsdError at construction; later trouble is counted, logged, and a miss.
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
        """`sync_ms`: interval of syncs; 0: sync each put before it returns. `backend`: one of `backends`."""
        self.directory = Path(directory)
        self.slot_bytes = slot_bytes
        self.nbytes = nbytes
        self.health = Health(str(directory))
        self._index = SsdIndex(policy)
        self._reads = self._read_failures = 0  # successful reads; failures since the last success
        counted = ("hits", "misses", "writes", "evictions", "corrupt", "failures", "renewals")
        self._counts = dict.fromkeys(counted, 0)
        self._medium: Medium = backends[backend](self.directory, slot_bytes, nbytes, root)
        self.capacity = self._medium.capacity
        self._index.adopt(*self._medium.adopt())
        self._writing = threading.RLock()  # the owner's thread and the renewing thread take turns
        self._syncing = threading.Lock()  # prevents a renewal during a sync
        self._sync_s = sync_ms / 1000
        self._renew_at, self._renew_pause_s = 0.0, RENEW_AGAIN_S
        self._stop = threading.Event()
        self._written = threading.Event()
        self._tender = threading.Thread(target=self._tend, name="ssd-sync", daemon=True)
        self._tender.start()

    # --- queries

    def contains(self, key: BlockKey) -> bool:
        return key in self._index.entries

    def content(self, key: BlockKey) -> tuple[int, int] | None:
        """(checksum, bytes) of a block here."""
        entry = self._index.entries.get(key)
        return None if entry is None else (entry.checksum, entry.length)

    def facts(self, key: BlockKey) -> Facts:
        """The block's facts at the time of its write."""
        entry = self._index.entries.get(key)
        return PLAIN if entry is None else entry.facts

    def watch(self, changed: Callable[[BlockKey, bool], None]) -> None:
        """See SsdIndex.watch."""
        self._index.watch(changed)

    def is_durable(self, key: BlockKey) -> bool:
        """Whether the block is here, and no sync has failed since its write."""
        return self._index.is_durable(key)

    def doubtful_keys(self) -> list[BlockKey]:
        """The blocks here that were written before a sync that failed, and must be written again to be safe."""
        return self._index.doubtful_keys()

    def all_keys(self) -> list[BlockKey]:
        """All blocks here, in no order."""
        return self._index.keys()

    def kept_keys(self) -> list[BlockKey]:
        """All blocks that are never evicted."""
        return self._index.kept_keys()

    def touch(self, key: BlockKey) -> None:
        """A hit in a higher tier: counts as a use of this copy too."""
        self._index.touch(key)

    # --- writing

    def put(self, key: BlockKey, memory: Buffer, block_checksum: int, facts: Facts = PLAIN) -> bool:
        """Write one block of 1 to `slot_bytes` bytes. Returns True if it is here afterwards. The memory must not change
        meanwhile. The checksum is stored as given, so a block that was already damaged is detected at its next read."""
        return self.put_many([New(key, memory, block_checksum, facts)])[0]

    def put_many(self, rows: Sequence[New]) -> list[bool]:
        """`put` for several blocks, with one sync in total if every put is synced."""
        for row in rows:
            if not 0 < len(row.memory) <= self.slot_bytes:
                raise ValueError(
                    f"a block of {len(row.memory)} bytes exceeds the slots of {self.slot_bytes} bytes in this tier"
                )
        done: list[bool] = []
        step = self._medium.batch
        with self._writing:
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
        if self.health.closed:
            return False
        new = self._index.lacking(rows)
        if not new:
            return True
        victims = self._index.take_victims(len(self._index.entries) + len(new) - self.capacity)
        doomed = self._index.take_doomed()
        try:
            with self.health.doing("write"):
                entries = self._write(new, victims + doomed)
        except (Full, OSError) as error:
            self._index.adopt(victims, doomed)
            self._failed("write", error)
            return False
        except Damaged as error:
            self._renew(error)
            return False
        self.health.worked("write")
        for row, entry in zip(new, entries, strict=True):
            self._index.enter(row.key, entry)
        self._counts["writes"] += len(new)
        self._counts["evictions"] += len(victims)
        self._written.set()
        return True

    def _write(self, new: Sequence[New], erase: Sequence[Found]) -> list[Entry]:
        """Raises Full, Damaged, OSError; then nothing was written."""
        for _ in range(WRITE_TRIES - 1):
            try:
                return self._medium.write(new, erase)
            except Full:
                more = self._index.take_victims(1)
                self._medium.erase(more)
                self._counts["evictions"] += len(more)
        return self._medium.write(new, erase)

    def keep(self, key: BlockKey, kept: bool) -> bool:
        """Set whether the block is kept (never evicted), also after a restart. Returns False if it is not here or the
        disk fails."""
        with self._writing:
            if self.health.closed:
                return False
            here, marked = self._index.keep(key, kept)
            if marked is None:
                return here
            try:
                with self.health.doing("write"):
                    self._medium.mark([(key, marked)])
            except Damaged as error:
                self._renew(error)
                return False
            except (Full, OSError) as error:
                self._failed("write", error)
                return False
            self._written.set()
            return True

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Remove these keys from the index, including running writes. The caller must then call `erase_forgotten(keys)`
        in the owner's thread, after the writes that have begun."""
        self._index.forget(keys)

    def erase_forgotten(self, keys: Sequence[BlockKey]) -> None:
        """Erase forgotten keys on disk, so that a restart does not find them."""
        with self._writing:
            self._index.end_forgetting(keys)
            doomed = self._index.take_doomed()
            if self.health.closed or not doomed:
                return
            try:
                with self.health.doing("write"):
                    self._medium.erase(doomed)
            except Damaged as error:
                self._renew(error)
            except (Full, OSError) as error:
                self._failed("delete", error)
                self._index.doom(doomed)
            else:
                self.health.worked("delete")
            self._written.set()

    def delete(self, key: BlockKey) -> bool:
        """Delete the block. Returns False if it was not here."""
        here = self.contains(key)
        self.forget([key])
        self.erase_forgotten([key])
        return here

    # --- reading

    def get(self, key: BlockKey, into: Buffer) -> Entry | None:
        """Copy a block into `into` (slot_bytes, writable), verify its checksum there, and return its entry. Returns
        None for a miss; then the content of `into` is undefined."""
        entry = self._index.entries.get(key)
        if entry is None or entry.length > len(into):
            self._counts["misses"] += 1
            return None
        target = memoryview(into)
        try:
            with self.health.doing("read"):
                self._medium.read(entry, target)
            self.health.worked("read")
            good = checksum(target[: entry.length]) == entry.checksum
            self._read_failures = 0
        except OSError as error:
            self._read_failed(key, entry, error)
            return None
        if good:
            self._reads += 1
            self._counts["hits"] += 1
            self._index.was_read(key)
            return entry
        if not self._index.drop(key, entry):  # evicted by the writing thread meanwhile, and overwritten
            self._counts["misses"] += 1
            return None
        self._counts["corrupt"] = count = self._counts["corrupt"] + 1
        if _is_power_of_two(count):
            log.warning("dropped damaged block %s in %s (%d so far)", key.hex(), self.directory, count)
        return None

    # --- blocks in use

    def hold(self, key: BlockKey) -> Entry | None:
        """Protect the block from eviction until `unhold`, for as long as this process lives. None if it is not here."""
        return self._index.hold(key)

    def unhold(self, keys: Sequence[BlockKey]) -> None:
        """Undo one `hold` of each."""
        self._index.unhold(keys)

    def read_part(self, entry: Entry, begin: int, into: memoryview) -> None:
        """Fill `into` with a part of a held block, from its byte `begin` on. The caller verifies it: the block may have
        been removed, or the medium renewed. Raises OSError."""
        with self.health.doing("read"):
            self._medium.read_part(entry, begin, into)

    # --- trouble

    @property
    def readable(self) -> bool:
        """Whether a read may succeed soon."""
        return self._read_failures < READ_FAILURES and not self.health.reads_stalled

    def _read_failed(self, key: BlockKey, entry: Entry, error: OSError) -> None:
        """The disk has failed, possibly temporarily; or only this block, if others were read since its last failure."""
        self._counts["misses"] += 1
        self._read_failures += 1
        self._failed("read", error)
        if self._index.read_failed(key, entry, self._reads):
            self._counts["corrupt"] += 1

    def _try_reading(self) -> None:
        """Read any block to check whether the disk works again, then a block whose last read failed: if it can be read
        now, its next failure, however late, does not count with that one."""
        key = self._index.any_key() if self._read_failures else self._index.unread_key()
        if key is not None:
            self.get(key, bytearray(self.slot_bytes))
        elif self._read_failures:
            self._read_failures = 0
            self.health.worked("read")

    def _renew(self, error: Damaged) -> None:
        """Replace the damaged medium by an empty one and continue serving."""
        log.warning("%s is damaged (%s); starting with an empty tier", self.directory, error)
        self._index.clear()
        self._counts["renewals"] += 1
        self._renew_pause_s = RENEW_AGAIN_S
        self._renew_now()

    def _renew_now(self) -> None:
        try:
            with self._syncing, self.health.doing("write"):
                self._medium.renew()
        except (SsdError, OSError) as failure:
            self._failed("renewal", failure)
            self.health.closed = str(failure)
            self._renew_at = time.monotonic() + self._renew_pause_s
            self._renew_pause_s = min(RENEW_AGAIN_MAX_S, 2 * self._renew_pause_s)
            return
        self.health.renewed()
        if self.health.closed:
            log.warning("reopened %s with an empty tier", self.directory)
            self.health.closed = ""

    def _failed(self, what: str, error: Exception) -> None:
        """Count a failure, and log it at powers of two, so that a dead disk does not fill the log."""
        self.health.failed(what, error)
        self._counts["failures"] = count = self._counts["failures"] + 1
        if _is_power_of_two(count):
            log.warning("SSD tier %s: %s failed (%d failures so far): %s", self.directory, what, count, error)

    # --- life

    def sync(self) -> bool:
        """Returns True if everything written so far is on disk."""
        with self._syncing:
            pending = self._index.take_unsynced()
            try:
                if self.health.closed:
                    raise OSError(f"it is closed: {self.health.closed}")
                with self.health.doing("sync"):
                    self._medium.sync()
            except OSError as error:
                self._index.doubt(pending)
                self._failed("sync", error)
                self._written.set()
                return False
        self.health.worked("sync")
        return True

    @property
    def num_blocks(self) -> int:
        return len(self._index.entries)

    def stats(self) -> dict[str, Any]:
        return {
            "blocks": len(self._index.entries),
            "capacity": self.capacity,
            "bytes": len(self._index.entries) * self.slot_bytes,
            "held": self._index.num_held,
            "map_bytes": self.nbytes,
            "closed": int(bool(self.health.closed)),
            "failing": int(self.health.failing),
            "stalled": int(self.health.reads_stalled or self.health.writes_stalled),
            "trouble": self.health.trouble,
        } | self._counts

    def _tend(self) -> None:
        """Background thread: sync written data, and retry failed operations."""
        sync_at = tend_at = time.monotonic()
        while not self._stop.wait(min(self._sync_s or TEND_S, TEND_S)):
            now = time.monotonic()
            if now >= tend_at + TEND_S:
                tend_at = now
                self._try_again(now)
            if self._sync_s and now >= sync_at + self._sync_s and self._written.is_set():
                sync_at = now
                self._written.clear()
                self.sync()

    def _try_again(self, now: float) -> None:
        if self.health.closed:
            if now >= self._renew_at:
                with self._writing:
                    self._renew_now()
            return
        self._try_reading()
        if self.health.failing:
            self.erase_forgotten(())
            self.sync()

    def close(self) -> None:
        """Sync and release the directory. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._tender.join()
        self._medium.close()


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
