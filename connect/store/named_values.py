"""NamedValues: values of any size under names of any length, in the pool of one tenant (cache/named/names.py).

Every method takes many names and makes few calls: one for the heads of all, and one for the parts of all values that do
not fit into a slot. The first writer of a name wins, like everywhere in the pool (docs/store.md).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from ctypes import string_at
from functools import partial

from cache.block import BlockKey
from cache.named.names import OUTSET_BYTES, WHOLE, Head, NotAHead, Space
from cache.store.scattered import NO_ROOM, OVER_QUOTA, PRESENT, STORED, UNPINNED, UNREACHABLE, Scatter
from cache.store.store import Store
from connect.common.raw_memory import Pieces
from connect.store import codes

Target = Callable[[int, int], Pieces | int]
"""(position, bytes of the value) -> where it goes, or a code if it goes nowhere."""

CODES = {
    STORED: codes.OK,
    PRESENT: codes.OK,
    NO_ROOM: codes.NO_ROOM,
    UNREACHABLE: codes.NO_ANSWER,
    UNPINNED: codes.NO_ROOM,
    OVER_QUOTA: codes.QUOTA,
}
REMOVE_AT_ONCE = 4096  # keys


class NamedValues:
    """Use it on the event loop of `store`."""

    def __init__(self, store: Store, tenant: str) -> None:
        self._store = store
        self._space = Space.of(tenant)
        self._parts_seen = False  # whether this client has met a value with parts

    # --- put

    async def put(self, items: Sequence[tuple[str, Pieces]], *, pin: bool = False, replicas: int = 1) -> list[int]:
        """A code per item: OK also if the name had a value, which stays. Two items of one name: the first counts.
        `replicas`: this many copies, if the pool does not make more anyway; fewer where nodes are missing or full."""
        first: dict[str, int] = {}
        for i, (name, _) in enumerate(items):
            first.setdefault(name, i)
        chosen = list(first.values())
        ends = await self._put([items[i] for i in chosen], pin, replicas)
        by_name = dict(zip(first, ends, strict=True))
        return [by_name[name] for name, _ in items]

    async def put_new(self, items: Sequence[tuple[str, Pieces]]) -> list[int]:
        """Like `put`, but asks first, so that nothing is copied of values that are there: their code is EXISTS."""
        ends = [codes.EXISTS if here else codes.OK for here in await self.exist([name for name, _ in items])]
        new = [i for i, end in enumerate(ends) if end == codes.OK]
        for i, end in zip(new, await self.put([items[i] for i in new]) if new else (), strict=True):
            ends[i] = end
        return ends

    async def _put(self, items: Sequence[tuple[str, Pieces]], pin: bool, replicas: int) -> list[int]:
        ends: list[int] = [codes.OK] * len(items)
        heads: dict[int, Head] = {}
        for i, (name, value) in enumerate(items):
            head = Head(name, value.nbytes)
            packed = len(head.pack())
            if not name or not value.nbytes or packed > self._store.block_bytes:
                ends[i] = codes.INVALID
            elif packed + value.nbytes <= self._store.block_bytes:
                heads[i] = head
            else:
                heads[i] = Head(name, value.nbytes, os.urandom(len(WHOLE)))
        large = [i for i, head in heads.items() if head.identity != WHOLE]
        if large:
            await self._put_parts(items, heads, large, ends, pin, replicas)
        await self._put_heads(items, heads, ends, pin, replicas)
        return ends

    async def _put_parts(
        self,
        items: Sequence[tuple[str, Pieces]],
        heads: dict[int, Head],
        large: list[int],
        ends: list[int],
        pin: bool,
        replicas: int,
    ) -> None:
        """Put the parts of the values `large` whose names are free; the others, and failed ones, leave `heads`."""
        self._parts_seen = True
        there = await self._store.exists_many([self._space.key(heads[i].name) for i in large])
        for i in [i for i, taken in zip(large, there, strict=True) if taken]:
            del heads[i]
        blocks: list[Scatter] = []
        owners: list[int] = []
        size = self._store.block_bytes
        for i in large:
            if i not in heads:
                continue
            value = items[i][1]
            for number, key in enumerate(self._space.part_keys(heads[i], size)):
                start = number * size
                length = min(size, value.nbytes - start)
                blocks.append(Scatter(key, length, partial(value.copy_to, start=start, nbytes=length)))
                owners.append(i)
        done = await self._store.scattered.put_each(blocks, pin=pin, named=True, replicas=replicas)
        for i, end in zip(owners, done, strict=True):
            if CODES[end] != codes.OK:
                ends[i] = CODES[end]
        failed = [i for i in large if i in heads and ends[i] != codes.OK]
        await self._remove_parts([heads.pop(i) for i in failed])

    async def _put_heads(
        self, items: Sequence[tuple[str, Pieces]], heads: dict[int, Head], ends: list[int], pin: bool, replicas: int
    ) -> None:
        order = list(heads)
        blocks = [_head_block(self._space.key(heads[i].name), heads[i], items[i][1]) for i in order]
        done = await self._store.scattered.put_each(blocks, pin=pin, replicas=replicas)
        for i, end in zip(order, done, strict=True):
            ends[i] = CODES[end]
        await self._remove_heads([heads[i] for i, end in zip(order, done, strict=True) if end == UNPINNED])
        # Another writer was faster, or there was no room.
        await self._remove_parts(
            [heads[i] for i, end in zip(order, done, strict=True) if end not in (STORED, UNPINNED)]
        )

    # --- get

    async def get(self, names: Sequence[str], target: Target) -> list[int]:
        """Per name the bytes that went to target(i, bytes of the value), or a code."""
        ends: list[int] = [codes.MISSING] * len(names)
        rest: dict[int, tuple[Head, Pieces]] = {}

        def take(i: int, address: int, nbytes: int) -> None:
            head, start = _read_head(address, nbytes)
            if head.name != names[i] or (head.identity == WHOLE and start + head.nbytes != nbytes):
                return  # two names of one key, which a hash of 80 bits makes rare; or a block that is no named value
            into = target(i, head.nbytes)
            if isinstance(into, int):
                ends[i] = into
            elif head.identity != WHOLE:
                rest[i] = head, into
            else:
                into.copy_from(address + start, 0, head.nbytes)
                ends[i] = head.nbytes

        await self._store.scattered.get_each([self._space.key(name) for name in names], _quiet(take))
        if rest:
            await self._get_parts(rest, ends)
        return ends

    async def _get_parts(self, rest: dict[int, tuple[Head, Pieces]], ends: list[int]) -> None:
        self._parts_seen = True
        size = self._store.block_bytes
        keys: list[BlockKey] = []
        places: list[tuple[int, int]] = []  # (position, start in its value)
        for i, (head, _) in rest.items():
            for number, key in enumerate(self._space.part_keys(head, size)):
                keys.append(key)
                places.append((i, number * size))
        arrived = dict.fromkeys(rest, 0)

        def take(at: int, address: int, nbytes: int) -> None:
            i, start = places[at]
            rest[i][1].copy_from(address, start, nbytes)
            arrived[i] += nbytes

        await self._store.scattered.get_each(keys, take)
        for i, (head, _) in rest.items():
            ends[i] = head.nbytes if arrived[i] == head.nbytes else codes.MISSING

    # --- the rest

    async def exist(self, names: Sequence[str]) -> list[bool]:
        """Whether each value is there. Parts are asked for only if this client has met a value with parts."""
        keys = [self._space.key(name) for name in names]
        there = await self._store.exists_many(keys)
        if not self._parts_seen:
            return there
        heads = await self._heads([key for key, here in zip(keys, there, strict=True) if here])
        parts = {key: self._space.part_keys(head, self._store.block_bytes) for key, head in heads.items()}
        wanted = [one for some in parts.values() for one in some]
        have = dict(zip(wanted, await self._store.exists_many(wanted), strict=True))
        return [here and all(have[one] for one in parts.get(key, ())) for key, here in zip(keys, there, strict=True)]

    async def sizes(self, names: Sequence[str]) -> list[int]:
        """Bytes of each value, or MISSING."""
        keys = [self._space.key(name) for name in names]
        heads = await self._heads(keys)
        return [heads[key].nbytes if key in heads else codes.MISSING for key in keys]

    async def on_ssd(self, names: Sequence[str]) -> list[bool | None]:
        """Whether the value must first be read from an SSD; None for a missing one."""
        runs = await asyncio.gather(*(self._store.find([self._space.key(name)]) for name in names))
        return [run.ssd_blocks > 0 if run.blocks else None for run in runs]

    async def remove(self, names: Sequence[str]) -> list[int]:
        """OK or MISSING for each."""
        keys = [self._space.key(name) for name in names]
        heads = await self._heads(keys)
        await self._remove_heads(list(heads.values()))
        return [codes.OK if key in heads else codes.MISSING for key in keys]

    async def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """The names that contain a match."""
        heads = (await self._heads(await self._store.keys_of_homes(self._space.names))).values()
        return [head.name for head in heads if pattern.search(head.name)]

    async def remove_matching(self, pattern: re.Pattern[str]) -> int:
        """Remove the values whose names contain a match; returns their number."""
        heads = (await self._heads(await self._store.keys_of_homes(self._space.names))).values()
        chosen = [head for head in heads if pattern.search(head.name)]
        await self._remove_heads(chosen)
        return len(chosen)

    async def remove_all(self) -> int:
        """Remove all values of the tenant; returns their number. Names first: what is found was there completely."""
        names = await self._store.keys_of_homes(self._space.names)
        await self._remove_keys(names)
        await self._remove_keys(await self._store.keys_of_homes(self._space.parts))
        return len(names)

    async def _remove_heads(self, heads: Sequence[Head]) -> None:
        await self._remove_keys([self._space.key(head.name) for head in heads])
        await self._remove_parts(heads)

    async def _remove_parts(self, heads: Sequence[Head]) -> None:
        await self._remove_keys([key for head in heads for key in self._space.part_keys(head, self._store.block_bytes)])

    async def _remove_keys(self, keys: Sequence[BlockKey]) -> None:
        for first in range(0, len(keys), REMOVE_AT_ONCE):
            await self._store.remove_many(keys[first : first + REMOVE_AT_ONCE])

    async def _heads(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Head]:
        """The heads of those of `keys` that are here."""
        found: dict[BlockKey, Head] = {}
        longer: list[BlockKey] = []
        for key, outset in (await self._store.outsets(keys, OUTSET_BYTES)).items():
            try:
                found[key], _ = Head.unpack(outset)
            except NotAHead:
                longer += [key] if len(outset) == OUTSET_BYTES else []

        def take(i: int, address: int, nbytes: int) -> None:
            found[longer[i]], _ = _read_head(address, nbytes)

        await self._store.scattered.get_each(longer, _quiet(take))
        return found


def _head_block(key: BlockKey, head: Head, value: Pieces) -> Scatter:
    packed = head.pack()
    if head.identity != WHOLE:
        return Scatter(key, len(packed), partial(Pieces.of(packed).copy_to, start=0, nbytes=len(packed)))

    def fill(address: int) -> None:
        Pieces.of(packed).copy_to(address, 0, len(packed))
        value.copy_to(address + len(packed), 0, value.nbytes)

    return Scatter(key, len(packed) + value.nbytes, fill)


def _read_head(address: int, nbytes: int) -> tuple[Head, int]:
    """The head of the block at `address`, and its length. Raises NotAHead."""
    try:
        return Head.unpack(string_at(address, min(nbytes, OUTSET_BYTES)))
    except NotAHead:
        if nbytes <= OUTSET_BYTES:
            raise
        return Head.unpack(string_at(address, nbytes))


def _quiet(take: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
    """A block that is no named value counts as missing."""

    def quiet(i: int, address: int, nbytes: int) -> None:
        try:
            take(i, address, nbytes)
        except NotAHead:
            return

    return quiet
