"""The pooled store for programs without an event loop.

    from mooncake_client import Store

    with Store("127.0.0.1:8000") as store:        # the HTTP address of any node
        store.put("objects/adapter", data)        # named bytes of any size
        store.get("objects/adapter")              # None when it is missing
        store.put(key, value)                     # 16-byte key, at most block_bytes bytes: KV blocks and the like
        store.get_many([key, other])

A missing value is None and never an error; a failure raises an exception whose message says what to do. Any thread may
make any call. An event loop in its own thread does the work (cache/store/store.py). A forked child has no such thread:
it needs a Store of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

from cache.arena import Buffer
from cache.block import KEY_BYTES
from cache.protocol import Deadlines
from cache.results import GetResult, NoRoom, NotDurable, StoreError, Unreachable
from cache.store.objects import PREFIX, Exists, Objects
from cache.store.remote import Remote
from net.loop.own_thread import EventLoop, LoopClosed
from net.transfer.common.memory import Region

__all__ = ["Exists", "NoRoom", "NotDurable", "Store", "StoreError", "Unreachable"]

T = TypeVar("T")
Key = bytes | str
"""16 bytes, or a name that starts with 'objects/'."""


class Store:
    """`address`: HOST:PORT of any node; `api_key` and `cluster_key_file`: the same as the nodes'. Raises ClusterError
    if no node answers there, KeyFileError, PeerRefused."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        cluster_key_file: str | None = None,
        transports: Sequence[str] = ("shm", "tcp"),
        deadlines: Deadlines | None = None,
    ) -> None:
        self._loop = EventLoop("store")
        self._regions: list[Region] = []
        self._closed = False
        try:
            self._remote = self._run(
                Remote.open(
                    address,
                    api_key=api_key,
                    cluster_key_file=cluster_key_file,
                    transports=transports,
                    deadlines=deadlines,
                )
            )
        except BaseException:
            self._loop.close()
            raise
        self._store = self._remote.store
        self._objects = Objects(self._store)

    @property
    def block_bytes(self) -> int:
        """The longest value under a 16-byte key, and the size of a slot in an arena."""
        return self._store.block_bytes

    # --- values and objects

    def get(self, key: Key) -> bytes | bytearray | None:
        """The value or object; None when it is missing."""
        if isinstance(key, str):
            return self._run(self._objects.get(key))
        return self._run(self._store.get(_value_key(key)))

    def get_many(self, keys: Sequence[Key]) -> list[bytes | bytearray | None]:
        """Gets values in batches and objects one after the other; None for each missing one."""
        names = [i for i, key in enumerate(keys) if isinstance(key, str)]
        values = [(i, _value_key(key)) for i, key in enumerate(keys) if not isinstance(key, str)]
        out: list[bytes | bytearray | None] = [None] * len(keys)
        found = self._run(self._store.get_many([key for _, key in values])) if values else []
        for (i, _), value in zip(values, found, strict=True):
            out[i] = value
        for i in names:
            out[i] = self.get(keys[i])
        return out

    def put(self, key: Key, value: Buffer, *, replace: bool = False, durable: bool = False, pin: bool = False) -> bool:
        """False when the key was there. The first value stays while all homes answer. `replace` replaces an object of
        different bytes; without it Exists is raised.

        When this returns, the value is in the memory of its homes, which write it to their SSD tiers a moment later: a
        home that is killed before that loses it. `durable`: wait until the value is synced on a home's SSD, where it
        survives kill -9. It may be evicted later, like everything, unless it is pinned. `pin`: homes never evict it,
        until `unpin` or `remove`. Raises NoRoom, also when homes hold as many pinned values as they may (--pin-share),
        NotDurable, Unreachable."""
        if isinstance(key, str):
            return self._run(self._objects.put(key, value, replace=replace, durable=durable, pin=pin))
        return self._run(self._store.put(_value_key(key), value, durable=durable, pin=pin))

    def put_many(
        self, items: Sequence[tuple[bytes, Buffer]], *, durable: bool = False, pin: bool = False
    ) -> list[bool]:
        """Values only; returns for each item whether it is new. `durable`, `pin`: see `put`."""
        rows = [(_value_key(key), value) for key, value in items]
        return self._run(self._store.put_many(rows, durable=durable, pin=pin))

    def unpin(self, key: Key) -> bool:
        """Allow its eviction again. False when it was not pinned."""
        if isinstance(key, str):
            return self._run(self._objects.unpin(key))
        return self._run(self._store.unpin_many([_value_key(key)])) > 0

    def exists(self, key: Key) -> bool:
        """Whether the value, or the whole object, is there now."""
        if isinstance(key, str):
            return self._run(self._objects.exists(key))
        return self._run(self._store.exists(_value_key(key)))

    def exists_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Values only."""
        return self._run(self._store.exists_many([_value_key(key) for key in keys]))

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is there now."""
        return self._run(self._store.lookup(keys))

    def remove(self, key: Key) -> bool:
        """False when it was not there."""
        if isinstance(key, str):
            return self._run(self._objects.remove(key))
        return self._run(self._store.remove(_value_key(key)))

    def remove_many(self, keys: Sequence[bytes]) -> int:
        """Values only; returns the number of removed copies."""
        return self._run(self._store.remove_many([_value_key(key) for key in keys]))

    def flush(self) -> None:
        """Wait until all values put so far are synced on SSD at all homes that have one. Raises NotDurable when a disk
        fails, Unreachable when a home does not answer."""
        self._run(self._store.flush())

    # --- objects, piece by piece

    def stream(self, name: str) -> Iterator[bytes]:
        """An object in pieces of at most block_bytes, in order. Raises LookupError when it, or the rest of it, is
        missing."""
        return self._each(lambda: self._objects.stream(name))

    def read_into(self, name: str, into: bytearray | memoryview) -> int | None:
        """Read an object into the caller's memory; returns its length in bytes, None when it is missing. Raises
        ValueError when it does not fit."""
        return self._run(self._objects.get_into(name, memoryview(into).cast("B")))

    # --- arenas

    def arena(self, name: str, nbytes: int) -> Region:
        """Shared memory for `get_into` and `put_from`, which move blocks without a copy. It lives as long as this
        client."""
        region = Region.shared(name, nbytes)
        self._regions.append(region)
        self._call(self._store.attach, region)
        return region

    def get_into(self, keys: Sequence[bytes], arena: Region, offsets: Sequence[int]) -> GetResult:
        """Get the leading run of `keys`, block i to offsets[i] of `arena`."""
        return self._run(self._store.get_into(keys, arena.name, offsets))

    def stream_into(self, keys: Sequence[bytes], arena: Region, offsets: Sequence[int]) -> Iterator[GetResult]:
        """The same for a long prefix in windows: the next window arrives while the caller uses this one. It ends with
        the prefix or with a result that is shorter than its window; a caller that leaves earlier must close the
        iterator."""
        return self._each(lambda: self._store.stream_into(keys, arena.name, offsets))

    def put_from(
        self,
        keys: Sequence[bytes],
        arena: Region,
        offsets: Sequence[int],
        *,
        durable: bool = False,
        pin: bool = False,
    ) -> int:
        """Put blocks of block_bytes from offsets[i] of `arena`; returns how many are new. `durable`, `pin`: see `put`;
        without them a block that no home accepts is skipped."""
        return self._run(self._store.put_from(keys, arena.name, offsets, durable=durable, pin=pin))

    # --- accounts and life

    def stats(self) -> dict[str, Any]:
        """`client`: counters of this client; `homes`: each node's statistics of its share, None if it does not
        answer."""
        return {"client": self._store.stats(), "homes": self._run(self._store.stats_of_homes())}

    def close(self) -> None:
        """Idempotent. Calls of other threads that still run raise StoreError. In a forked child it does nothing."""
        if self._closed or not self._loop.alive:
            return
        self._closed = True
        self._run(self._remote.close())
        self._loop.close()
        for region in self._regions:
            region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(work)
        except LoopClosed as error:
            raise StoreError(f"this Store cannot be used any more: {error}") from None

    def _each(self, begin: Callable[[], AsyncGenerator[T]]) -> Iterator[T]:
        """Yields the items of a generator on the event loop; closing this one closes that one."""

        async def begun() -> AsyncGenerator[T]:
            return begin()

        items = self._run(begun())

        async def following() -> tuple[T] | None:
            async for item in items:
                return (item,)
            return None

        try:
            while (found := self._run(following())) is not None:
                yield found[0]
        finally:
            self._run(items.aclose())

    def _call(self, function: Any, *arguments: Any) -> None:
        async def call() -> None:
            function(*arguments)

        self._run(call())


def _value_key(key: bytes) -> bytes:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"{key!r} is neither {KEY_BYTES} bytes nor a name that starts with {PREFIX}")
    return key
