"""Named blocks in the BlockPool of production: one slot each, and anonymous slots for all other KV.

The slots are as large as the blocks of the trace. KV under no name is that of all requests together, in as few slots as
it fills: nodes have smaller blocks, so that hardly anything of their last ones is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.block import BlockKey
from cache.pool.block_pool import BlockPool
from cache.pool.policy import EvictionPolicy, Facts
from lab.simulator.arena.accounts import Arena, FactsByPosition, Room
from lab.simulator.models.shares import key_of


class PooledArena(Arena):
    """An arena with the pool and the prefix index of a node."""

    def __init__(self, room: Room, facts: FactsByPosition, policy: EvictionPolicy) -> None:
        super().__init__(room, facts)
        self.pool = BlockPool(room.slots, policy)
        self._policy = policy
        self._anonymous: list[int] = []  # slots
        self._over = 0  # blocks that went because of most_kept
        self.pool.watch(self._tell)

    def _tell(self, key: BlockKey, here: bool) -> None:
        self._changed_to(int.from_bytes(key, "little"), here)

    @property
    def evicted(self) -> int:
        return self.pool.num_evictions + self._over

    @property
    def _in_use(self) -> int:
        return self.pool.num_blocks - self.pool.num_free - len(self._anonymous)

    def _acquire(self, blocks: Sequence[int]) -> None:
        free = self.pool.num_free
        self.pool.acquire(self._slots(blocks))
        self.used += (free - self.pool.num_free) * self.room.block_tokens

    def _release(self, blocks: Sequence[int]) -> None:
        free = self.pool.num_free
        self.pool.release(self._slots(blocks))
        self.used -= (self.pool.num_free - free) * self.room.block_tokens

    def _slots(self, blocks: Sequence[int]) -> list[int]:
        return self.pool.match([key_of(block) for block in blocks])

    def _name(self, block: int, facts: Facts) -> bool:
        key = key_of(block)
        if (known := self.pool.lookup(key)) is not None and self.pool.is_held(known):
            return False  # the KV stays under no name, and needs a slot only if other blocks leave none
        if self._anonymous:  # the KV has a slot already
            self.pool.release([self._anonymous.pop()])
        (slot,) = self.pool.allocate(1)
        self.pool.name_again(slot, key, facts)
        self.used += self.room.block_tokens
        return True

    def _forget(self, block: int) -> None:
        self.pool.forget(key_of(block))

    def _make_room(self) -> None:
        """Slots for all KV under no name. Only a request that is alone and larger than the arena gets fewer."""
        pool, room, mine = self.pool, self.room, self._anonymous
        available = len(mine) + pool.num_free
        wanted = available - min(available, max(0, self.left // room.kept_tokens))
        if wanted > len(mine):
            mine += pool.allocate(wanted - len(mine))
        elif wanted < len(mine):
            pool.release(mine[wanted:])
            del mine[wanted:]
        while len(self._policy) > room.most_kept:
            pool.forget(self._policy.victim())  # type: ignore[arg-type]  # its items are keys
            self._over += 1
