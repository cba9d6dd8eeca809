"""SsdIndex: the blocks on disk, in memory: the place, checksum and facts of each, and which leave next. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from cache.block import BlockKey
from cache.pool.policy import LRU, EvictionPolicy
from cache.ssd.medium import Entry, Found, New


class SsdIndex:
    """`entries` may be read without a lock. Blocks that leave the index are doomed until the medium has erased them."""

    def __init__(self, policy: EvictionPolicy | None) -> None:
        self.entries: dict[BlockKey, Entry] = {}
        self._policy: EvictionPolicy = LRU() if policy is None else policy
        self._lock = threading.Lock()  # held only briefly
        self._doomed: list[Found] = []  # erased with the next write
        self._forgotten: Counter[BlockKey] = Counter()  # their running writes will not be indexed
        self._unsynced: set[BlockKey] = set()  # written since the last sync began
        self._doubtful: set[BlockKey] = set()  # written before a sync that failed: the kernel may have dropped them
        self._unread: dict[BlockKey, int] = {}  # blocks whose last read failed -> number of successful reads by then
        self._held: Counter[BlockKey] = Counter()  # not evicted until `unhold`; a restart forgets it
        self._watchers: list[Callable[[BlockKey, bool], None]] = []

    def watch(self, changed: Callable[[BlockKey, bool], None]) -> None:
        """Call `changed(key, True)` for every block here, and `changed(key, here)` for each later change, in the thread
        that makes it and before it lets go of the index."""
        with self._lock:
            for key in self.entries:
                changed(key, True)
            self._watchers.append(changed)

    def is_durable(self, key: BlockKey) -> bool:
        """Whether the block is here, and no sync has failed since its write."""
        return key in self.entries and key not in self._doubtful

    def doubtful_keys(self) -> list[BlockKey]:
        """The blocks here that were written before a sync that failed."""
        with self._lock:
            return list(self._doubtful)

    def keys(self) -> list[BlockKey]:
        """All blocks, in no order."""
        with self._lock:
            return list(self.entries)

    def kept_keys(self) -> list[BlockKey]:
        """All blocks that are never evicted."""
        with self._lock:
            return [key for key, entry in self.entries.items() if entry.kept]

    def touch(self, key: BlockKey) -> None:
        """Count a use."""
        with self._lock:
            if key in self.entries:
                self._policy.touched(key)

    def was_read(self, key: BlockKey) -> None:
        """A read succeeded: a use, and earlier failures were temporary."""
        with self._lock:
            self._unread.pop(key, None)
            if key in self.entries:
                self._policy.touched(key)

    # --- blocks that come

    def adopt(self, found: Sequence[Found], doomed: Sequence[Found]) -> None:
        """Takes over the blocks of earlier processes. `doomed`: their entries that must be erased."""
        self.doom(doomed)
        for key, entry in found:
            self.enter(key, entry)

    def lacking(self, rows: Sequence[New]) -> list[New]:
        """Those of `rows` that must be written, each key once. Blocks written before a failed sync leave, so that they
        are written again."""
        with self._lock:
            for row in rows:
                if row.key in self._doubtful:
                    self._drop(row.key)
            return list({row.key: row for row in rows if row.key not in self.entries}.values())

    def enter(self, key: BlockKey, entry: Entry) -> None:
        """The block is on the medium. One that was forgotten while it was written is doomed at once."""
        with self._lock:
            if key in self._forgotten:
                self._doomed.append((key, entry))
                return
            self.entries[key] = entry
            self._tell(key, True)
            self._unsynced.add(key)
            self._policy.added(key, entry.facts)
            if entry.kept or key in self._held:
                self._policy.pinned(key)

    def keep(self, key: BlockKey, kept: bool) -> tuple[bool, Entry | None]:
        """Set whether the block is kept. Returns whether it is here, and its new entry if that changed."""
        with self._lock:
            entry = self.entries.get(key)
            if entry is None or entry.kept == kept:
                return entry is not None, None
            marked = self.entries[key] = entry._replace(kept=kept)
            if key not in self._held:
                (self._policy.pinned if kept else self._policy.unpinned)(key)
            return True, marked

    def hold(self, key: BlockKey) -> Entry | None:
        """The block is not evicted until `unhold`. None if it is not here."""
        with self._lock:
            entry = self.entries.get(key)
            if entry is None:
                return None
            if key not in self._held and not entry.kept:
                self._policy.pinned(key)
            self._held[key] += 1
            return entry

    def unhold(self, keys: Sequence[BlockKey]) -> None:
        """Undo one `hold` of each, also of those that are gone."""
        with self._lock:
            for key in keys:
                self._held[key] -= 1
                if self._held[key] <= 0:
                    del self._held[key]
                    entry = self.entries.get(key)
                    if entry is not None and not entry.kept:
                        self._policy.unpinned(key)

    @property
    def num_held(self) -> int:
        """Blocks that are not evicted now, without the kept ones."""
        return len(self._held)

    # --- blocks that leave

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Drop these, including running writes, until `end_forgetting`."""
        with self._lock:
            for key in keys:
                self._forgotten[key] += 1
                self._drop(key)

    def end_forgetting(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._forgotten.subtract(keys)
            self._forgotten = +self._forgotten

    def drop(self, key: BlockKey, entry: Entry) -> bool:
        """Drop a damaged block. False if it is not the one of this entry any more."""
        with self._lock:
            if self.entries.get(key) is not entry:
                return False
            self._drop(key)
            return True

    def take_victims(self, count: int) -> list[Found]:
        """Remove and return the next `count` victims."""
        taken: list[Found] = []
        with self._lock:
            while len(taken) < count and len(self._policy):
                key = cast(BlockKey, self._policy.victim())
                entry = self._leave(key)
                if entry is not None:
                    taken.append((key, entry))
        return taken

    def doom(self, rows: Sequence[Found]) -> None:
        """These are to be erased."""
        with self._lock:
            self._doomed += rows

    def take_doomed(self) -> list[Found]:
        with self._lock:
            doomed, self._doomed = self._doomed, []
        return doomed

    def clear(self) -> None:
        """The medium has lost everything."""
        with self._lock:
            for key in list(self.entries):
                self._leave(key)
            self._doomed.clear()

    # --- syncs and reads

    def take_unsynced(self) -> set[BlockKey]:
        """The blocks written since the last call: a sync begins."""
        with self._lock:
            pending, self._unsynced = self._unsynced, set()
        return pending

    def doubt(self, keys: set[BlockKey]) -> None:
        """The sync of these failed."""
        with self._lock:
            self._doubtful |= keys & self.entries.keys()

    def read_failed(self, key: BlockKey, entry: Entry, reads: int) -> bool:
        """A read failed, after `reads` successful reads of the tier. Drops the block and returns True if others were
        read since its last failure, so that it is the block that is damaged."""
        with self._lock:
            if self.entries.get(key) is not entry or self._unread.setdefault(key, reads) >= reads:
                return False
            self._drop(key)
            return True

    def unread_key(self) -> BlockKey | None:
        """A block whose last read failed."""
        with self._lock:
            return next(iter(self._unread), None)

    def any_key(self) -> BlockKey | None:
        """A block to try a read with; rather one whose last read did not fail."""
        with self._lock:
            return next((key for key in self.entries if key not in self._unread), next(iter(self.entries), None))

    def _drop(self, key: BlockKey) -> None:
        if (entry := self._leave(key)) is not None:
            self._doomed.append((key, entry))

    def _leave(self, key: BlockKey) -> Entry | None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._tell(key, False)
            self._policy.removed(key)
            self._unread.pop(key, None)
            self._unsynced.discard(key)
            self._doubtful.discard(key)
        return entry

    def _tell(self, key: BlockKey, here: bool) -> None:
        for changed in self._watchers:
            changed(key, here)
