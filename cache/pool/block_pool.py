"""BlockPool: which slots of an arena are in use, and what content the unused slots still have. Pure.

A block has two reference counts: one for requests and one for transfers in flight. The block is held while either
count is above zero. When both are zero, a block without a key is free. A block with a key is cached: `match` finds it
by its key, and the pool evicts it when it needs room.

A model whose layers are in groups takes the blocks of all of them from one pool. `assign` says which group a block is
for, so every account and every error names the group.

    free ──allocate──> held ──name──> held and named
      ^                 │                │       ^
      └─both counts 0───┘    both counts 0       acquire, hold
      ^                                  v       │
      └──────────evict, forget───────── cached ──┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from cache.block import BlockKey
from cache.pool.aside import Aside
from cache.pool.policy import LRU, PLAIN, EvictionPolicy, Facts, Sharing
from cache.pool.prefix import Place, PrefixIndex


class OutOfBlocks(Exception):
    """A caller requested more blocks than are free or evictable. Nothing was allocated."""


class IntegrityError(Exception):
    """The pool's books disagree: a bug."""


@dataclass(slots=True)
class Newcomer:
    """A named block in its first use. The policy learns of it at the end of this use, when it becomes evictable. At
    that time the last block of a prompt comes first, so no policy evicts a prefix before its continuation."""

    facts: Facts
    hits: int = 0


class BlockPool:
    """Slots 0..num_blocks-1 of one arena. Every method is O(1) per block, or as fast as the policy."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._request_refs = [0] * num_blocks
        self._transfer_refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; low ids first
        self._index = PrefixIndex()
        self._policy: EvictionPolicy = LRU() if policy is None else policy  # its items are keys
        self._sharing = self._policy if isinstance(self._policy, Sharing) else None
        self._group_of: dict[int, int] = {}  # groups of blocks that are not free and not of group 0
        self._class_of: dict[int, str] = {}  # classes of blocks from `allocate_for`, until they are free
        self._newcomers: dict[BlockKey, Newcomer] = {}
        self._aside = Aside()

    def watch(self, changed: Callable[[BlockKey, bool], None], *, places: bool = False) -> None:
        """Call `changed(key, True)` for every key held now, and `changed(key, held)` for each later change. `places`:
        see PrefixIndex.watch."""
        self._index.watch(changed, places=places)

    # --- room

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now: free blocks, and cached blocks without references."""
        return len(self._free) + len(self._policy)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one request reference each and undefined content. Evicts by policy if needed. Raises
        OutOfBlocks and then changes nothing."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks requested, but only {self.num_free} of {self.num_blocks} are available")
        for _ in range(count - len(self._free)):
            self._evict(self._victim())
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._request_refs[block_id] = 1
        return block_ids

    def allocate_for(self, facts: Facts) -> int:
        """Like `allocate`, for one block whose content will have these facts. If classes have shares, its class takes
        no block from a class that is within its share."""
        if not self._free:
            key = self.next_victim(facts)
            if key is None:
                raise OutOfBlocks("all blocks are in use, or of classes that are within their shares (--cache-shares)")
            self._evict(key)
        block_id = self._free.pop()
        self._request_refs[block_id] = 1
        if self._sharing is not None:
            self._class_of[block_id] = facts.service_class
            self._sharing.took(facts.service_class)
        return block_id

    def has_room_for(self, facts: Facts) -> bool:
        """Whether `allocate_for` would succeed."""
        return bool(self._free) or self.next_victim(facts) is not None

    def _evict(self, key: BlockKey) -> None:
        if self._index.block_of(key) is None:
            raise IntegrityError(f"key {key.hex()} is evictable but has no block")
        self.num_evictions += 1
        self.forget(key)

    def next_victim(self, facts: Facts) -> BlockKey | None:
        """The key that `allocate_for` would evict; None when it would evict nothing, or fail."""
        if self._free or not len(self._policy):
            return None
        if self._sharing is not None:
            return cast("BlockKey | None", self._sharing.victim_for(facts.service_class))
        return self._victim()

    def _victim(self) -> BlockKey:
        """What was put aside, otherwise as the policy says. Raises LookupError when nothing is evictable."""
        first = self._aside.first(self._in_use) if len(self._aside) else None
        return cast(BlockKey, self._policy.victim()) if first is None else first

    def _in_use(self, key: BlockKey) -> bool:
        block_id = self._index.block_of(key)
        return block_id is None or self.is_held(block_id)

    @property
    def num_aside(self) -> int:
        """Blocks that were put aside, and are here."""
        return len(self._aside)

    @property
    def num_unwanted(self) -> int:
        """Blocks that are free or were put aside: new content in them takes no room from what may be wanted sooner. If
        classes have shares, only the free ones: the shares may evict others before those put aside."""
        return len(self._free) + (0 if self._sharing is not None else len(self._aside))

    def put_aside(self, rows: Iterable[tuple[BlockKey, float]]) -> None:
        """From now on these blocks, as far as they are here, are evicted before all others, and among them the one that
        is wanted at the latest time; until their next hit. If classes have shares, their policy alone chooses."""
        self._aside.add([row for row in rows if self._index.block_of(row[0]) is not None])

    def _freed(self, block_id: int) -> None:
        self._free.append(block_id)
        if self._group_of:
            self._group_of.pop(block_id, None)
        if self._sharing is not None and block_id in self._class_of:
            self._sharing.gave(self._class_of.pop(block_id))

    # --- groups

    def assign(self, block_ids: Iterable[int], group: int) -> None:
        """Say that these blocks, fresh from `allocate`, are for a group other than 0, until they are free."""
        for block_id in block_ids:
            self._group_of[block_id] = group

    def group_of(self, block_id: int) -> int:
        return self._group_of.get(block_id, 0)

    # --- references

    def acquire(self, block_ids: Sequence[int]) -> None:
        """A hit: add one request reference to each block. The blocks must be held or cached (found by `match`)."""
        self._take(self._request_refs, block_ids)
        self.touch(block_ids)

    def touch(self, block_ids: Sequence[int]) -> None:
        """A hit that takes no reference."""
        for block_id in reversed(block_ids):
            key = self._index.key_of(block_id)
            if key is None:
                continue
            self._aside.discard(key)
            if key in self._newcomers:
                self._newcomers[key].hits += 1
            else:
                self._policy.touched(key)

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one request reference from each block. The last block of a prefix becomes evictable first, so the
        remaining blocks are still a prefix."""
        self._give(self._request_refs, reversed(block_ids))

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one transfer reference to each block: the pool does not reuse their memory until `unhold`."""
        self._take(self._transfer_refs, block_ids)

    def unhold(self, block_ids: Sequence[int]) -> None:
        """Remove one transfer reference from each block."""
        self._give(self._transfer_refs, reversed(block_ids))

    def _take(self, refs: list[int], block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if not self.is_held(block_id):
                key = self._index.key_of(block_id)
                if key is None:
                    raise ValueError(f"block {block_id} is free: allocate it first")
                self._policy.pinned(key)
            refs[block_id] += 1

    def _give(self, refs: list[int], block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if refs[block_id] == 0:
                raise ValueError(f"block {block_id} has no such reference to release")
            refs[block_id] -= 1
            if self._request_refs[block_id] or self._transfer_refs[block_id]:
                continue
            key = self._index.key_of(block_id)
            if key is None:
                self._freed(block_id)
            elif (newcomer := self._newcomers.pop(key, None)) is not None:
                self._policy.added(key, newcomer.facts)
                for _ in range(newcomer.hits):
                    self._policy.touched(key)
            else:
                self._policy.unpinned(key)

    def is_held(self, block_id: int) -> bool:
        """Whether a request or a transfer uses this block."""
        return self._request_refs[block_id] > 0 or self._transfer_refs[block_id] > 0

    # --- content

    def name(self, block_id: int, key: BlockKey, facts: Facts = PLAIN, place: Place | None = None) -> bool:
        """Declare the content of the held block complete and known as `key`. Returns False when another block already
        has that key: this block then stays unnamed and becomes free at its last reference. The policy gets `facts`.
        `place`: of a block of another group than 0."""
        if not self.is_held(block_id):
            raise ValueError(f"block {block_id} is not held, so no key may name its content")
        known = self._index.block_of(key)
        if known is not None:
            return known == block_id
        self._index.add(key, block_id, place)
        self._newcomers[key] = Newcomer(facts)
        return True

    def name_again(self, block_id: int, key: BlockKey, facts: Facts = PLAIN, place: Place | None = None) -> bool:
        """Like `name`, but if the other block is only cached, this one takes its name, and that one is free. So all
        blocks of a prompt that was computed again are evicted in its order: a cached block in the middle of it is older
        than its continuation and would leave first. Still returns False, because the key is not new."""
        known = self._index.block_of(key)
        if known is None or known == block_id or self.is_held(known):
            return self.name(block_id, key, facts, place)
        if not self.is_held(block_id):
            raise ValueError(f"block {block_id} is not held, so no key may name its content")
        self._index.move(key, block_id)
        self._aside.discard(key)
        self._policy.removed(key)
        self._newcomers[key] = Newcomer(facts, hits=1)
        self._freed(known)
        return False

    def forget(self, key: BlockKey) -> bool:
        """Remove `key` from the index; its block becomes free once it has no references. False for an unknown key."""
        block_id = self._index.block_of(key)
        if block_id is None:
            return False
        self._index.remove(block_id)
        self._aside.discard(key)
        if self._newcomers.pop(key, None) is None:
            self._policy.removed(key)
        if not self.is_held(block_id):
            self._freed(block_id)
        return True

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest leading run of `keys`. Takes no reference: `acquire` before the next `allocate`."""
        return self._index.match(keys)

    def lookup(self, key: BlockKey) -> int | None:
        return self._index.block_of(key)

    def keys(self) -> list[BlockKey]:
        """The keys of all named blocks, held or cached."""
        return [key for key, _ in self._index.pairs()]

    def key_of(self, block_id: int) -> BlockKey | None:
        return self._index.key_of(block_id)

    # --- accounts

    def usage(self) -> dict[str, int]:
        """Blocks by state: free + cached + held = total."""
        free, cached = len(self._free), len(self._policy)
        return {
            "total": self.num_blocks,
            "free": free,
            "cached": cached,
            "held": self.num_blocks - free - cached,
            "named": len(self._index),
            "evictions": self.num_evictions,
        }

    def usage_by_group(self) -> dict[int, dict[str, int]]:
        """Blocks of each group that are cached or held. O(num_blocks)."""
        found = {group: {"cached": 0, "held": 0} for group in {0, *self._group_of.values()}}
        for block_id in range(self.num_blocks):
            if self.is_held(block_id):
                found[self.group_of(block_id)]["held"] += 1
            elif self._index.key_of(block_id) is not None:
                found[self.group_of(block_id)]["cached"] += 1
        return found

    def references(self) -> dict[str, int]:
        """Sums of both counts, for leak checks: both are zero on a node without work."""
        return {"request": sum(self._request_refs), "transfer": sum(self._transfer_refs)}

    def check_transfer_owners(self, owned: Iterable[int]) -> None:
        """`owned` lists each block once per transfer reference that a component claims to hold. Raises IntegrityError
        when the claims differ from the counts, with the groups and their blocks."""
        self._check_owners(self._transfer_refs, owned, "transfers")

    def check_request_owners(self, owned: Iterable[int]) -> None:
        """`owned` lists each block once per request reference that a component claims to hold. Raises IntegrityError
        when the claims differ from the counts, with the groups and their blocks."""
        self._check_owners(self._request_refs, owned, "requests")

    def _check_owners(self, counts: Sequence[int], owned: Iterable[int], owners: str) -> None:
        claims = Counter(owned)
        lost = [block for block, count in enumerate(counts) if count > claims[block]]
        false = [block for block, count in enumerate(counts) if count < claims[block]]
        if lost:
            raise IntegrityError(f"{len(lost)} blocks are held for unknown {owners}: {self._by_group(lost)}")
        if false:
            raise IntegrityError(f"{len(false)} blocks of running {owners} are not held: {self._by_group(false)}")

    def check_integrity(self) -> None:
        """Recounts every block. Raises IntegrityError unless free + cached + held = total, with the blocks of each
        group counted by themselves, and all maps agree."""
        free = set(self._free)
        held = {b for b in range(self.num_blocks) if self.is_held(b)}
        cached = {b for _, b in self._index.pairs() if b not in held}
        nowhere = set(range(self.num_blocks)) - free - held - cached
        problems = []
        if negative := [b for b in range(self.num_blocks) if min(self._request_refs[b], self._transfer_refs[b]) < 0]:
            problems.append(f"a reference count is negative: {self._by_group(negative)}")
        if len(free) != len(self._free):
            problems.append("a block is in the free list twice")
        if wrong := free & (held | cached):
            problems.append(f"free blocks are in use or cached: {self._by_group(wrong)}")
        if wrong := free & set(self._group_of):
            problems.append(f"free blocks still belong to groups: {self._by_group(wrong)}")
        if nowhere:
            problems.append(f"blocks are neither free nor cached nor held: {self._by_group(nowhere)}")
        if len(free) + len(cached) + len(held) != self.num_blocks:
            problems.append(f"free {len(free)} + cached {len(cached)} + held {len(held)} != total {self.num_blocks}")
        if len(self._policy) != len(cached):
            problems.append(f"the policy has {len(self._policy)} evictable blocks, the pool {len(cached)}")
        if not self._index.consistent():
            problems.append("key -> block and block -> key disagree")
        if problems:
            raise IntegrityError("; ".join(problems))

    def _by_group(self, block_ids: Iterable[int]) -> str:
        """The first blocks of each group, for an error: `group 1: [7, 9], group 2: [4]`."""
        groups: dict[int, list[int]] = {}
        for block_id in sorted(block_ids):
            groups.setdefault(self.group_of(block_id), []).append(block_id)
        return ", ".join(f"group {group}: {blocks[:16]}" for group, blocks in sorted(groups.items()))
