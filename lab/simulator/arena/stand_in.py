"""Named blocks without slots: the same calls of the eviction policy as BlockPool, at less cost.

tests/lab/simulator/test_arena.py holds it against block_pool.py: the same blocks after every event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from cache.pool.policy import EvictionPolicy, Facts
from lab.simulator.arena.accounts import Arena, FactsByPosition, Room


class StandIn(Arena):
    """An arena as large clusters have it."""

    def __init__(self, room: Room, facts: FactsByPosition, policy: EvictionPolicy) -> None:
        super().__init__(room, facts)
        self._policy = policy
        self._evicted = 0
        self._users: dict[int, int] = {}  # of the blocks in use
        self._newcomers: dict[int, tuple[Facts, int]] = {}  # in their first use: facts and hits

    @property
    def evicted(self) -> int:
        return self._evicted

    @property
    def _in_use(self) -> int:
        return len(self._users)

    def _acquire(self, blocks: Sequence[int]) -> None:
        users, policy = self._users, self._policy
        for block in blocks:
            if block in users:
                users[block] += 1
            else:
                policy.pinned(block)
                users[block] = 1
                self.used += self.room.block_tokens
        for block in reversed(blocks):
            if block in self._newcomers:
                facts, hits = self._newcomers[block]
                self._newcomers[block] = facts, hits + 1
            else:
                policy.touched(block)

    def _release(self, blocks: Sequence[int]) -> None:
        users, policy = self._users, self._policy
        for block in reversed(blocks):
            if users[block] > 1:
                users[block] -= 1
                continue
            del users[block]
            self.used -= self.room.block_tokens
            newcomer = self._newcomers.pop(block, None)
            if newcomer is None:
                policy.unpinned(block)
                continue
            facts, hits = newcomer
            policy.added(block, facts)
            for _ in range(hits):
                policy.touched(block)

    def _name(self, block: int, facts: Facts) -> bool:
        if block in self._users:
            return False
        known = block in self.blocks
        if known:
            self._policy.removed(block)
        else:
            self._changed_to(block, True)
        self._newcomers[block] = facts, int(known)
        self._users[block] = 1
        self.used += self.room.block_tokens
        return True

    def _forget(self, block: int) -> None:
        self._policy.removed(block)
        self._changed_to(block, False)

    def _make_room(self) -> None:
        kept = len(self._policy)
        if not kept:
            return
        room = self.room
        most = min(room.most_kept, self.left // room.kept_tokens, room.slots - len(self._users))
        while kept > most and kept:
            self._forget(cast(int, self._policy.victim()))
            self._evicted += 1
            kept -= 1
