"""The pooled store by the classes of production, in virtual time.

A block is at its home by rendezvous hashing (cache/homes/rendezvous.py) among the members. Each node's share is a
BlockPool with the eviction and admission policies of a node, and behind it the index of an SSD tier
(cache/ssd/index.py): a block put into DRAM stays there until it is written behind, and a block only on SSD is promoted
into DRAM to be read. A use of a node's own copy does not keep the pool's copy young. Not modelled: repair after a
change of members, replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

from cache.arena import UNCHECKED
from cache.block import KEY_BYTES, BlockKey
from cache.homes.rendezvous import by_home, equal_members
from cache.pool.admission import Admission
from cache.pool.block_pool import BlockPool, OutOfBlocks
from cache.pool.policy import PLAIN, EvictionPolicy, Facts
from cache.sessions.parked import ParkedBlocks, Times
from cache.sessions.residence import Residence
from cache.ssd.index import SsdIndex
from cache.ssd.medium import Entry
from lab.simulator.models.disk import Disk

NEARLY_FULL = 0.95
"""As in cache/tiers/local_store.py."""

SCAN_KEYS = 256
"""As in cache/store/keeper.py."""


def key_of(block: int) -> BlockKey:
    return block.to_bytes(KEY_BYTES, "little")


@lru_cache(maxsize=4)
def _known_homes(names: tuple[str, ...], members: tuple[str, ...]) -> dict[int, int]:
    """Block -> index in `names` of its home among `members`, as far as known. A home follows from these alone, so all
    runs of a process share them."""
    return {}


class Share:
    """One node's share of the pool, like cache/tiers/local_store.py."""

    def __init__(
        self,
        policy: Callable[[], EvictionPolicy],
        admission: Admission,
        dram_blocks: int,
        ssd_blocks: int,
        disk: Disk,
        nbytes: float,
    ) -> None:
        """nbytes: bytes of a block."""
        self.dram = BlockPool(dram_blocks, policy())
        self.ssd = SsdIndex(policy())
        self.disk = disk
        self._admission, self._ssd_blocks, self._nbytes = admission, ssd_blocks, nbytes
        self._life = 0
        self.parked = ParkedBlocks[BlockKey]()
        self._residence = Residence(dram_blocks)
        self.raised = self.dropped = 0  # blocks of sessions, as Keeper counts them

    @property
    def is_nearly_full(self) -> bool:
        """Whether new blocks will soon replace others: on SSD, or in DRAM without one."""
        if self._ssd_blocks:
            return len(self.ssd.entries) >= NEARLY_FULL * self._ssd_blocks
        usage = self.dram.usage()
        return usage["free"] <= (1 - NEARLY_FULL) * usage["total"]

    def has(self, key: BlockKey) -> bool:
        return self.dram.lookup(key) is not None or key in self.ssd.entries

    def is_cold(self, key: BlockKey) -> bool:
        """Whether the block is on SSD only."""
        return self.dram.lookup(key) is None and key in self.ssd.entries

    def put(self, key: BlockKey, facts: Facts) -> None:
        """A node offers the block, as Reservations.reserve decides."""
        self._admission.wanted(key)
        if self.has(key):
            return
        victim = self.dram.next_victim(facts)
        if victim is not None and not self._admission.admits(key, facts, victim):
            return
        slot = self._filled(key, facts)
        if slot is None:
            return
        if self._ssd_blocks:
            self.dram.hold([slot])
            self.disk.move(1, self._nbytes, partial(self._written, self._life, key, slot, facts))
        self.dram.release([slot])

    def promoted(self, keys: Iterable[BlockKey]) -> None:
        """These were read from SSD."""
        for key in keys:
            facts = self.ssd.entries[key].facts if key in self.ssd.entries else PLAIN
            if self.dram.lookup(key) is None and (slot := self._filled(key, facts)) is not None:
                self.dram.release([slot])

    def used(self, keys: Iterable[BlockKey]) -> None:
        """A reader gets these: touch them in DRAM, and their copies below."""
        for key in keys:
            self._admission.wanted(key)
            if (slot := self.dram.lookup(key)) is not None:
                self.dram.touch([slot])
            self.ssd.touch(key)
            self.parked.used([key])

    def move_sessions(self, now: float, raises: bool = True) -> None:
        """Move the blocks of sessions whose time has come, as Keeper does. raises: from SSD too."""
        due = self.parked.due(now)
        self.dram.put_aside([(key, now + wanted_s) for key, wanted_s in due.down])
        for key in self.parked.over(SCAN_KEYS) if self.is_nearly_full else ():
            self.dropped += self.has(key)
            self.dram.forget(key)
            self.ssd.forget([key])
            self.ssd.end_forgetting([key])
        self._residence.seen(now, self.dram.num_evictions)
        stay_s = self._residence.seconds()
        up = [key for key, wait_s in due.up if wait_s <= stay_s]
        self.dram.touch([slot for key in up if (slot := self.dram.lookup(key)) is not None])
        cold = [key for key in up if self.is_cold(key)][: self.dram.num_unwanted] if raises else []
        self.raised += len(cold)
        if cold:
            self.disk.move(len(cold), len(cold) * self._nbytes, partial(self.promoted, cold))

    def clear(self) -> None:
        """The DRAM is lost."""
        for key in list(self.dram.keys()):
            self.dram.forget(key)
        self._life += 1

    def _filled(self, key: BlockKey, facts: Facts) -> int | None:
        """A slot that holds the block, with a reference; None if all are in use."""
        try:
            slot = self.dram.allocate_for(facts)
        except OutOfBlocks:
            return None
        self.dram.name(slot, key, facts)
        return slot

    def _written(self, life: int, key: BlockKey, slot: int, facts: Facts) -> None:
        """The block is on SSD too."""
        self.dram.unhold([slot])
        if life != self._life or key in self.ssd.entries:
            return
        if len(self.ssd.entries) >= self._ssd_blocks:
            self.ssd.take_victims(1)
        self.ssd.enter(key, Entry(0, UNCHECKED, int(self._nbytes), facts))


class HomedPool:
    """The pool of all nodes, with dram_blocks and ssd_blocks each."""

    kind = "real"

    def __init__(
        self,
        names: Sequence[str],
        policy: Callable[[], EvictionPolicy],
        admission: Callable[[], Admission],
        dram_blocks: int,
        ssd_blocks: int,
        disks: Sequence[Disk],
        nbytes: float,
    ) -> None:
        """nbytes: bytes of a block."""
        self.capacity = (dram_blocks + ssd_blocks) * len(names)
        self.raises = True  # blocks of sessions are read from SSD before a predicted return
        self.shares = [Share(policy, admission(), dram_blocks, ssd_blocks, disk, nbytes) for disk in disks]
        self._names, self._nbytes, self._has_ssd = list(names), nbytes, ssd_blocks > 0
        self._index = {name: index for index, name in enumerate(names)}
        self._members = equal_members(names)
        self._down: set[int] = set()
        self._homes = self._homes_now()

    # --- queries

    def run(self, blocks: Sequence[int]) -> int:
        """The number of leading blocks that are available."""
        return self._leading(blocks, lambda share, key: key in share.ssd.entries)

    def dram_run(self, blocks: Sequence[int]) -> int:
        """The number of leading blocks that are in DRAM."""
        return self._leading(blocks, lambda share, key: False)

    def cold(self, blocks: Sequence[int]) -> Counter[int]:
        """The number of these blocks that each node must read from its SSD."""
        return Counter(home for home, keys in self._cold(blocks).items() for _ in keys)

    def read_s(self, cold: Counter[int]) -> float:
        """Seconds that the slowest node would take to read these, starting now; 0 if there are none."""
        each = (self.shares[node].disk.seconds(count, count * self._nbytes) for node, count in cold.items())
        return max(each, default=0.0)

    def sources(self, blocks: Sequence[int]) -> Counter[int]:
        """The number of these blocks that each node has."""
        return Counter(self._homed(blocks))

    def missing(self, blocks: Sequence[int]) -> Counter[int]:
        """The number of these blocks that each node would have to get."""
        pairs = zip(blocks, self._homed(blocks), strict=True)
        return Counter(home for block, home in pairs if not self.shares[home].has(key_of(block)))

    # --- changes

    def read(self, blocks: Sequence[int], done: Callable[[], None]) -> None:
        """`done` is called when all of these are in DRAM."""
        cold = self._cold(blocks)
        for block, home in zip(blocks, self._homed(blocks), strict=True):
            self.shares[home].used([key_of(block)])
        left = len(cold)
        if not cold:
            done()
            return

        def ended(home: int) -> None:
            nonlocal left
            left -= 1
            self.shares[home].promoted(cold[home])
            if not left:
                done()

        for home, keys in cold.items():
            self.shares[home].disk.move(len(keys), len(keys) * self._nbytes, partial(ended, home))

    def use(self, blocks: Sequence[int], facts: Sequence[Facts]) -> None:
        """A prompt was computed, and its blocks are offered to their homes, the last one first."""
        homes = self._homed(blocks) if self.capacity else []
        for position in range(len(homes) - 1, -1, -1):
            if homes[position] not in self._down:
                self.shares[homes[position]].put(key_of(blocks[position]), facts[position])

    def park(self, now: float, blocks: Sequence[int], session: int, times: Times) -> None:
        """A turn of this session, which has these blocks, is over: each home hears of those that it has."""
        of_home: dict[int, list[BlockKey]] = {}
        for block, home in zip(blocks, self._homed(blocks), strict=True):
            if self.shares[home].has(key := key_of(block)):
                of_home.setdefault(home, []).append(key)
        for home, keys in of_home.items():
            self.shares[home].parked.park(now, keys, session, times)
        self.move_sessions(now)

    def move_sessions(self, now: float) -> None:
        """Every home moves the blocks of sessions whose time has come."""
        for share in self.shares:
            share.move_sessions(now, self.raises)

    @property
    def raised(self) -> int:
        """Blocks of sessions that were read from SSD before a return."""
        return sum(share.raised for share in self.shares)

    @property
    def dropped(self) -> int:
        """Blocks of sessions that did not return in time."""
        return sum(share.dropped for share in self.shares)

    def drop(self, blocks: Sequence[int]) -> None:
        """Homes remove these from DRAM, if they have them."""
        for block, home in zip(blocks, self._homed(blocks), strict=True):
            self.shares[home].dram.forget(key_of(block))

    def lost(self, node: int) -> None:
        """A crash: its DRAM is empty, and its SSD is unavailable until `back`."""
        self.shares[node].clear()
        self._down.add(node)

    def left(self, node: int) -> None:
        """The others know that it is gone: its keys get other homes, if there are others."""
        if len(self._members) > 1:
            self._members.pop(self._names[node], None)
        self._homes = self._homes_now()

    def back(self, node: int) -> None:
        self._down.discard(node)
        self._members[self._names[node]] = 1
        self._homes = self._homes_now()

    # --- homes

    def _homes_now(self) -> dict[int, int]:
        return _known_homes(tuple(self._names), tuple(sorted(self._members)))

    def _leading(self, blocks: Sequence[int], elsewhere: Callable[[Share, BlockKey], bool]) -> int:
        """Leading blocks that are in DRAM, or `elsewhere`."""
        if not self.capacity:
            return 0
        shares, down = self.shares, self._down
        for count, (block, home) in enumerate(zip(blocks, self._homed(blocks), strict=True)):
            share, key = shares[home], key_of(block)
            if home in down or (share.dram.lookup(key) is None and not elsewhere(share, key)):
                return count
        return len(blocks)

    def _cold(self, blocks: Sequence[int]) -> dict[int, list[BlockKey]]:
        found: dict[int, list[BlockKey]] = {}
        for block, home in zip(blocks, self._homed(blocks), strict=True) if self._has_ssd else ():
            if home not in self._down and self.shares[home].is_cold(key := key_of(block)):
                found.setdefault(home, []).append(key)
        return found

    def _homed(self, blocks: Sequence[int]) -> list[int]:
        """The home of each block."""
        homes = self._homes
        try:
            return [homes[block] for block in blocks]
        except KeyError:
            unknown = [block for block in blocks if block not in homes]
        for name, positions in by_home(list(map(key_of, unknown)), self._members).items():
            for position in positions:
                homes[unknown[position]] = self._index[name]
        return [homes[block] for block in blocks]
