"""MooncakeConnector: our pool as the remote storage of LMCache inside an engine.

    remote_storage_plugins: ["mooncake-pool"]
    extra_config:
      remote_storage_plugin.mooncake-pool.module_path: mooncake_rooms.connect.lmcache.remote
      remote_storage_plugin.mooncake-pool.class_name: MooncakeAdapter
      remote_storage_plugin.mooncake-pool.nodes: "127.0.0.1:8000"

A chunk is one value: LMCache's metadata of it, then its bytes. Whole chunks are read into LMCache's memory directly;
others (the last one of a prompt, compressed ones) are copied once more, because only their metadata says what to
allocate. docs/connect/lmcache.md has the other settings.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, List, TypeVar  # noqa: UP035 - `list` is a method here

from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from connect.common.raw_memory import Pieces
from connect.lmcache.chunks import engine_root, leading
from connect.store import codes
from connect.store.client import Client, NotReady, answering
from connect.store.named_values import NamedValues
from connect.store.settings import Setup

log = logging.getLogger("mooncake.connect")

T = TypeVar("T")
PLUGIN = "mooncake-pool"
SETTINGS = ("nodes", "root", "tenant_id")


class MooncakeAdapter(ConnectorAdapter):
    """Makes the connector of each plug-in of LMCache that is called mooncake-pool, or mooncake-pool.ANYTHING."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN}")

    def create_connector(self, context: Any) -> RemoteConnector:
        return MooncakeConnector(context)


class MooncakeConnector(RemoteConnector):
    """One per worker. Its coroutines run on LMCache's event loop. Raises ConnectionError if no node answers."""

    def __init__(self, context: Any) -> None:
        super().__init__(context.config, context.metadata)
        extra = context.config.extra_config or {}
        given = {name: extra.get(f"remote_storage_plugin.{context.plugin_name}.{name}") for name in SETTINGS}
        nodes = str(given["nodes"] or os.environ.get("MOONCAKE_MASTER", ""))
        tenant = str(given["tenant_id"] or os.environ.get("MOONCAKE_TENANT_ID") or "default")
        self._root = engine_root(context.config, context.metadata, str(given["root"] or "")) + "/"
        self._memory = context.local_cpu_backend
        self._client = Client()
        if code := self._client.open(Setup.of({"master_server_addr": nodes, "tenant_id": tenant})):
            raise ConnectionError(f"no node of the pool answers at {nodes or 'this host'} (code {code}): see the log")

    # --- is it there?

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    @answering(lambda given, code: 0)
    def batched_contains(self, keys: Sequence[Any]) -> int:
        """The number of leading chunks that are there; 0 also if the pool does not answer."""
        names = self._names(keys)
        return leading(self._client.run(lambda store: store.exist(names)))

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        """The same. Nothing is pinned: the pool may evict a chunk before it is read, which is then a miss."""
        names = self._names(keys)
        return leading(await self._ask(lambda store: store.exist(names), []))

    # --- get

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """Per key a memory object of LMCache, which the caller releases, or None."""
        names = self._names(keys)
        return await self._ask(lambda store: self._read(store, names), [None] * len(names), _release)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """The memory objects of the leading chunks that are there."""
        found = await self.batched_get(keys)
        hits = leading([one is not None for one in found])
        _release(found[hits:])
        return found[:hits]

    async def _read(self, store: NamedValues, names: list[str]) -> list[Any]:
        """In the client's thread."""
        heads = [bytearray(self.remote_metadata_bytes) for _ in names]
        chunks: list[Any] = [None] * len(names)
        others: dict[int, bytearray] = {}

        def target(i: int, nbytes: int) -> Pieces | int:
            rest = nbytes - len(heads[i])
            if rest == self.full_chunk_size_bytes:
                chunks[i] = self._room(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
                if chunks[i] is None:
                    return codes.NO_ROOM
                head = Pieces.of(heads[i])
                return Pieces([*head.pieces, (chunks[i].data_ptr, rest)], (head, chunks[i]))
            if rest <= 0:
                return codes.INVALID
            others[i] = bytearray(rest)
            return Pieces.of(heads[i], others[i])

        whole = RemoteMetadata(self.full_chunk_size_bytes, self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        try:
            ends = await store.get(names, target)
            for i, end in enumerate(ends):
                if i in others and end > 0:
                    chunks[i] = self._copied(bytes(heads[i]), others[i])
                elif chunks[i] is not None and (end <= 0 or bytes(heads[i]) != whole.serialize()):
                    chunks[i].ref_count_down()
                    chunks[i] = None
        except BaseException:
            _release(chunks)
            raise
        return chunks

    def _copied(self, head: bytes, value: bytearray) -> Any:
        """The value in memory of LMCache, as its metadata says."""
        metadata = RemoteMetadata.deserialize(head)
        made = self._room(metadata.shapes, metadata.dtypes, metadata.fmt) if metadata.length == len(value) else None
        if made is not None and made.get_size() == len(value):
            Pieces.of(value).copy_to(made.data_ptr, 0, len(value))
            return made
        _release([made])
        return None

    def _room(self, shapes: Any, dtypes: Any, fmt: Any) -> Any:
        """None if there is no memory: waiting here would stop the puts that give memory back."""
        return self._memory.allocate(shapes, dtypes, fmt, busy_loop=False)

    # --- put

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """The log names chunks that were not stored: they cost a prefill later."""
        items = [(name, self._value(one)) for name, one in zip(self._names(keys), memory_objs, strict=True)]
        for one in memory_objs:
            one.ref_count_up()  # LMCache may give up waiting; the bytes are still being read then

        async def work(store: NamedValues) -> Sequence[int]:
            try:
                return await store.put_new(items)
            finally:
                _release(memory_objs)

        ends: Sequence[int] = await self._ask(work, [codes.NO_ANSWER] * len(items))
        if failed := [end for end in ends if end not in (codes.OK, codes.EXISTS)]:
            log.warning("%s of %s chunks were not stored: codes %s", len(failed), len(items), sorted(set(failed)))

    def _value(self, memory_obj: Any) -> Pieces:
        content = memory_obj.byte_array
        shapes, dtypes = memory_obj.get_shapes(), memory_obj.get_dtypes()
        head = RemoteMetadata(len(content), shapes, dtypes, memory_obj.get_memory_format()).serialize()
        return Pieces.of(head, content)

    # --- the rest

    async def list(self) -> List[str]:  # noqa: UP006
        """LMCache's texts of the keys of this engine's geometry."""
        pattern = re.compile("^" + re.escape(self._root))
        nothing: List[str] = []  # noqa: UP006
        names = await self._ask(lambda store: store.matching(pattern), nothing)
        return [name.removeprefix(self._root) for name in names]

    def remove_sync(self, key: Any) -> bool:
        names = self._names([key])
        return self._client.run(lambda store: store.remove(names)) == [codes.OK]

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 if any node answers."""
        try:
            return 0 if await asyncio.to_thread(self._client.answers) else codes.NO_ANSWER
        except NotReady:
            return codes.NOT_READY

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    def _names(self, keys: Sequence[Any]) -> List[str]:  # noqa: UP006
        return [self._root + key.to_string() for key in keys]

    async def _ask(
        self,
        work: Callable[[NamedValues], Coroutine[Any, Any, T]],
        otherwise: T,
        give_back: Callable[[T], None] | None = None,
    ) -> T:
        """The work runs to its end in the client's thread also if LMCache stops waiting: its memory is in use until
        then; `give_back` gets a result that nobody waits for."""
        try:
            future = self._client.begin(work)
        except NotReady:
            log.warning("the connection to the pool is closed")
            return otherwise
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if future.cancelled():
                log.warning("the connection to the pool was closed meanwhile")
                return otherwise
            if give_back is not None:
                future.add_done_callback(lambda done: _end(done, give_back))
            raise
        except Exception:
            log.exception("the pool")
            return otherwise


def _release(chunks: Sequence[Any]) -> None:
    for one in chunks:
        if one is not None:
            one.ref_count_down()


def _end(done: Future[T], give_back: Callable[[T], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        give_back(done.result())
