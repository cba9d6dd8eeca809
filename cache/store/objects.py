"""Objects: named bytes of any size in the pooled store: weights, adapters, anything.

An object is cut into chunks of one block each, and a manifest holds its length and the digest of its content:

    manifest   key = hash(name)                           content = Manifest, 48 bytes
    chunk i    key = hash(name, content, i)               content = bytes

The manifest is written last and removed first, so a name that is found was written completely. The content is part of
the chunks' keys: chunks of an earlier object of that name are never mistaken for this one's. Unless it is pinned, a
chunk may be evicted like every block; then the whole object is missing. All belong to the class `objects`
(--cache-shares).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from xxhash import xxh3_128

from cache.block import KEY_BYTES, BlockKey
from cache.results import NoRoom, StoreError
from cache.store.store import Store
from net.loop.clock import loop_time

log = logging.getLogger(__name__)

PREFIX = "objects/"
RECORD = Struct("<8sQQ16s8x")  # magic, bytes, bytes of a chunk, digest of the content
MAGIC = b"mckobj01"
HASH_PIECE = 16 << 20
GIVE_BACK_S = 45.0  # longer than a client skips a home that did not answer (cache/store/calls.py)
GIVE_BACK_PAUSE_S = 0.5
PUT_TRIES = 3  # for chunks that were evicted before the last one was put


class Exists(Exception):
    """Another object has that name."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The length and content of an object."""

    nbytes: int
    chunk_bytes: int
    digest: bytes  # 16 bytes, xxh3 of the content

    @property
    def num_chunks(self) -> int:
        return -(-self.nbytes // self.chunk_bytes)

    def pack(self) -> bytes:
        return RECORD.pack(MAGIC, self.nbytes, self.chunk_bytes, self.digest)

    @staticmethod
    def unpack(record: bytes) -> Manifest:
        """Raises ValueError for a record of another version."""
        if len(record) != RECORD.size or not record.startswith(MAGIC):
            raise ValueError("not a manifest of this version")
        _, nbytes, chunk_bytes, digest = RECORD.unpack(record)
        return Manifest(nbytes, chunk_bytes, digest)


def manifest_key(name: str) -> BlockKey:
    """Raises ValueError for a name that is not in the key space."""
    if not name.startswith(PREFIX) or len(name) == len(PREFIX):
        raise ValueError(f"{name!r} is not the name of an object: names start with {PREFIX}")
    return blake2b(name.encode(), digest_size=KEY_BYTES, person=b"mooncake-object").digest()


def chunk_keys(name: str, manifest: Manifest, first: int, count: int) -> list[BlockKey]:
    """Keys of chunks first .. first + count - 1."""
    start = blake2b(manifest_key(name) + manifest.digest, digest_size=KEY_BYTES, person=b"mooncake-chunk")
    out = []
    for index in range(first, first + count):
        one = start.copy()
        one.update(index.to_bytes(8, "little"))
        out.append(one.digest())
    return out


def digest(data: memoryview) -> bytes:
    """128 bits over the content."""
    hasher = xxh3_128()
    for start in range(0, len(data), HASH_PIECE):
        hasher.update(data[start : start + HASH_PIECE])
    return hasher.digest()


class Objects:
    """The key space `objects/` of `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(
        self,
        name: str,
        data: bytes | bytearray | memoryview,
        *,
        replace: bool = False,
        durable: bool = False,
        pin: bool = False,
    ) -> bool:
        """Store `data` under `name`; False when the same bytes were there. `durable`, `pin`: see Store.put_many; they
        apply to the whole object. Raises Exists when other bytes are there, unless `replace`; NoRoom, NotDurable,
        Unreachable, and then no part of a new object stays and an old one of that name is unchanged."""
        view = memoryview(data).cast("B")
        content = await asyncio.to_thread(digest, view) if len(view) > HASH_PIECE else digest(view)
        manifest = Manifest(len(view), self._store.block_bytes, content)
        known = await self.info(name)
        if known is not None and known.digest != content and not replace:
            raise Exists(f"{name} exists with different content ({known.nbytes} bytes): remove it first, or replace it")
        new = known is None or known.digest != content
        was_pinned = False
        await self._check_room(name, manifest)
        try:
            await self._put_chunks(name, manifest, view, durable=durable, pin=pin)
            if new and known is not None:
                was_pinned = await self._store.unpin_many([manifest_key(name)]) > 0
                await self._store.remove_many([manifest_key(name)])
            if new or durable or pin:
                first = await self._store.put(manifest_key(name), manifest.pack(), durable=durable, pin=pin)
                if new and not first:  # another writer was faster
                    there = await self.info(name)
                    if there is not None and there.digest != content:
                        raise Exists(f"{name} was put with different content ({there.nbytes} bytes) at the same time")
                    return False
        except (StoreError, Exists):
            if new:
                await self._remove_whole(name, manifest)
            if new and known is not None:
                await self._give_back(name, known, manifest, was_pinned)
            raise
        if new and known is not None:
            await self._remove_chunks(name, known)
        return new

    async def _check_room(self, name: str, manifest: Manifest) -> None:
        """Raises NoRoom for an object that cannot fit as a whole, before anything is evicted for it."""
        if manifest.num_chunks < 2:
            return
        wanted: Counter[str] = Counter()
        for key in chunk_keys(name, manifest, 0, manifest.num_chunks):
            wanted.update(self._store.router.homes(key))
        for home, room in (await self._store.room_of_homes()).items():
            if wanted[home] > room:
                raise NoRoom(
                    f"{name} has {manifest.nbytes} bytes: {wanted[home]} blocks for {home}, which has room for {room}: "
                    "raise --ssd-bytes, or --dram-bytes, or add nodes"
                )

    async def _put_chunks(self, name: str, manifest: Manifest, view: memoryview, *, durable: bool, pin: bool) -> None:
        """Put all chunks, and again those that concurrent puts of others evicted meanwhile."""
        size, missing = manifest.chunk_bytes, list(range(manifest.num_chunks))
        keys = chunk_keys(name, manifest, 0, manifest.num_chunks)
        for _ in range(PUT_TRIES):
            for first in range(0, len(missing), self._store.values_at_once):
                rows = missing[first : first + self._store.values_at_once]
                items = [(keys[i], view[i * size : (i + 1) * size]) for i in rows]
                await self._store.put_many(items, durable=durable, pin=pin, named=True)
            here = await self._store.exists_many(keys)
            missing = [i for i, is_here in enumerate(here) if not is_here]
            if not missing:
                return
        raise NoRoom(
            f"{len(missing)} of {manifest.num_chunks} blocks of {name} were driven out while the others were put: "
            "raise --ssd-bytes or --dram-bytes"
        )

    async def _remove_whole(self, name: str, manifest: Manifest) -> None:
        """Remove the manifest, if it still has that content, and all chunks."""
        now = await self.info(name)
        if now is not None and now.digest == manifest.digest:
            await self._store.remove_many([manifest_key(name)])
        await self._remove_chunks(name, manifest)

    async def _give_back(self, name: str, known: Manifest, failed: Manifest, pin: bool) -> None:
        """Its replacement has failed: the name has the old content again, unless another writer has taken it. A home
        that has not answered is skipped for a while, and may have stored the new manifest all the same."""
        give_up_at = loop_time() + GIVE_BACK_S
        while True:
            with suppress(StoreError):
                await self._store.put(manifest_key(name), known.pack(), pin=pin)
            now = await self.info(name)
            if now is not None and now.digest != failed.digest:
                break
            if loop_time() > give_up_at:
                log.warning("%s is missing: its replacement has failed, and no home takes the old content", name)
                return
            if now is not None:
                await self._store.remove_many([manifest_key(name)])
            await asyncio.sleep(GIVE_BACK_PAUSE_S)
        if now.digest != known.digest:
            await self._remove_chunks(name, known)

    async def _remove_chunks(self, name: str, manifest: Manifest) -> None:
        await self._store.remove_many(chunk_keys(name, manifest, 0, manifest.num_chunks))

    async def unpin(self, name: str) -> bool:
        """Allow its eviction again. False when there is none, or it was not pinned."""
        manifest = await self.info(name)
        if manifest is None:
            return False
        keys = [manifest_key(name), *chunk_keys(name, manifest, 0, manifest.num_chunks)]
        return await self._store.unpin_many(keys) > 0

    async def get(self, name: str) -> bytearray | None:
        """The whole object; None when it, or a part of it, is missing."""
        manifest = await self.info(name)
        if manifest is None:
            return None
        out = bytearray(manifest.nbytes)
        return out if await self._fill(name, manifest, memoryview(out)) else None

    async def get_into(self, name: str, into: memoryview) -> int | None:
        """The same into the caller's memory; returns its length in bytes. Raises ValueError when it does not fit."""
        manifest = await self.info(name)
        if manifest is None:
            return None
        if manifest.nbytes > len(into):
            raise ValueError(f"{name} has {manifest.nbytes} bytes, the buffer {len(into)}")
        return manifest.nbytes if await self._fill(name, manifest, into) else None

    async def _fill(self, name: str, manifest: Manifest, out: memoryview) -> bool:
        async for first, parts in self._parts(name, manifest):
            at = first * manifest.chunk_bytes
            for part in parts:
                if part is None:
                    return False
                out[at : at + len(part)] = part
                at += len(part)
        return True

    async def stream(self, name: str) -> AsyncGenerator[bytes]:
        """The object in pieces of one chunk, in order. Raises LookupError when it, or the rest of it, is missing."""
        manifest = await self.info(name)
        if manifest is None:
            raise LookupError(f"{name} is not in the store")
        async for _, parts in self._parts(name, manifest):
            for part in parts:
                if part is None:
                    raise LookupError(f"a part of {name} is no longer in the store")
                yield part

    async def info(self, name: str) -> Manifest | None:
        """Size and digest; None when the name is missing."""
        record = await self._store.get(manifest_key(name))
        return None if record is None else Manifest.unpack(record)

    async def exists(self, name: str) -> bool:
        """Whether the whole object is there."""
        manifest = await self.info(name)
        if manifest is None:
            return False
        return all(await self._store.exists_many(chunk_keys(name, manifest, 0, manifest.num_chunks)))

    async def remove(self, name: str) -> bool:
        """False when there was none."""
        manifest = await self.info(name)
        if manifest is None:
            return False
        await self._store.remove_many([manifest_key(name)])
        await self._remove_chunks(name, manifest)
        return True

    async def _parts(self, name: str, manifest: Manifest) -> AsyncIterator[tuple[int, Sequence[bytes | None]]]:
        async for first, count in self._windows(manifest):
            yield first, await self._store.get_many(chunk_keys(name, manifest, first, count))

    async def _windows(self, manifest: Manifest) -> AsyncIterator[tuple[int, int]]:
        """(first, count) of the chunks that are moved together."""
        step = self._store.values_at_once
        for first in range(0, manifest.num_chunks, step):
            yield first, min(step, manifest.num_chunks - first)
