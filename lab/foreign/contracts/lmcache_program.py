"""LMCache loads our classes, and runs its own Mooncake connector on our module.

    python lmcache_program.py ADDRESS     in an interpreter with lmcache (--no-deps), torch and our package

LMCache's own storage backends, memory and controllers run on memory of this process; there is no engine and no GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from select import POLLIN, poll
from typing import Any

import torch
from checks import run_all
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.platform import consume_fd
from lmcache.v1.storage_backend import CreateStorageBackends

ADDRESS = sys.argv[1]
CHUNK, LAYERS, HEADS, WIDTH = 16, 3, 2, 32
PLUGIN = "mooncake-pool"
WAIT_S = 30.0
LOOP = asyncio.new_event_loop()


def config(plugin: str = PLUGIN, **extra: Any) -> Any:
    """LMCache's configuration of an engine, as its file gives it."""
    ours = f"remote_storage_plugin.{plugin}"
    given = {
        f"{ours}.module_path": "mooncake_rooms.connect.lmcache.remote",
        f"{ours}.class_name": "MooncakeAdapter",
        f"{ours}.nodes": ADDRESS,
    }
    return LMCacheEngineConfig.from_dict(
        {
            "chunk_size": CHUNK,
            "local_cpu": False,
            "max_local_cpu_size": 0.02,
            "remote_serde": "naive",
            "remote_storage_plugins": [plugin],
            "extra_config": given | {f"{ours}.{k}": v for k, v in extra.items()},
        }
    )


def metadata(**facts: Any) -> Any:
    given = {
        "model_name": "org/model", "world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0,
        "kv_dtype": torch.bfloat16, "kv_shape": (LAYERS, 2, CHUNK, HEADS, WIDTH), "chunk_size": CHUNK,
        "role": "worker",
    }  # fmt: skip
    return LMCacheMetadata(**(given | facts))


class Engine:
    """The storage backends that LMCache makes from a configuration, as inside an engine."""

    def __init__(self, settings: Any, facts: Any) -> None:
        self.facts = facts
        backends = CreateStorageBackends(settings, facts, LOOP, "cpu")
        self.local = backends["LocalCPUBackend"]
        (self.remote,) = (one for name, one in backends.items() if name != "LocalCPUBackend")
        assert self.remote.connection is not None, "LMCache made no connection: see the log"

    def chunk(self, tokens: int = CHUNK) -> Any:
        """Memory of LMCache with random content."""
        shapes = self.facts.get_shapes(tokens)
        made = self.local.allocate(shapes, self.facts.get_dtypes(), MemoryFormat.KV_2LTD)
        made.tensor.copy_(torch.randn(shapes[0]).to(torch.bfloat16))
        return made

    def keys(self, count: int) -> list[Any]:
        hashes = [random.getrandbits(60) for _ in range(count)]
        return [CacheEngineKey(self.facts.model_name, self.facts.world_size, self.facts.worker_id, h, torch.bfloat16)
                for h in hashes]  # fmt: skip

    def put(self, keys: Sequence[Any], chunks: Sequence[Any]) -> None:
        """Wait until LMCache calls back for each key."""
        done = threading.Semaphore(0)
        self.remote.batched_submit_put_task(keys, list(chunks), on_complete_callback=lambda _: done.release())
        for _ in keys:
            assert done.acquire(timeout=WAIT_S)

    def close(self) -> None:
        self.remote.close()


def moved(writer: Engine, reader: Engine) -> list[Any]:
    """Whole chunks through the pool, and a shorter last one; their keys."""
    keys = writer.keys(5)
    chunks = [*(writer.chunk() for _ in range(4)), writer.chunk(5)]
    assert reader.remote.batched_contains(keys) == 0
    before = [one.get_ref_count() for one in chunks]
    writer.put(keys, chunks)
    assert [one.get_ref_count() for one in chunks] == before, "a reference is left"
    assert reader.remote.batched_contains([*keys, *reader.keys(1)]) == 5
    assert reader.remote.contains(keys[3]) and not reader.remote.contains(reader.keys(1)[0])
    found = reader.remote.batched_get_blocking([*keys, *reader.keys(1)])
    assert found[5] is None
    for one, given in zip(found[:5], chunks, strict=True):
        assert one.get_shapes() == given.get_shapes() and torch.equal(one.tensor, given.tensor)
        assert one.get_ref_count() == 1
    for one in [*found[:5], *chunks]:
        one.ref_count_down()
    return keys


def engine_moves() -> None:
    """LMCache makes our connector from its configuration; whole and short chunks move between two engines"""
    writer, reader = Engine(config(), metadata()), Engine(config(), metadata())
    keys = moved(writer, reader)
    chunks = [writer.chunk() for _ in keys]
    writer.put(keys, chunks)
    (first,) = reader.remote.batched_get_blocking(keys[:1])
    assert not torch.equal(first.tensor, chunks[0].tensor), "the first writer of a key wins"
    got = reader.remote.get_blocking(keys[1])
    assert got is not None
    for one in [first, got, *chunks]:
        one.ref_count_down()
    writer.close()
    reader.close()


def engine_asynchronous() -> None:
    """the asynchronous lookup and get, ping, list and remove"""
    engine = Engine(config(), metadata())
    keys, chunks = engine.keys(4), [engine.chunk() for _ in range(4)]
    engine.put(keys[:1] + keys[2:], chunks[:1] + chunks[2:])

    async def ask() -> Any:
        hits = await engine.remote.batched_async_contains("lookup", keys)
        return hits, await engine.remote.batched_get_non_blocking("lookup", keys)

    hits, found = _on_loop(ask())
    assert hits == 1 and len(found) == 1 and torch.equal(found[0].tensor, chunks[0].tensor)
    connection = engine.remote.connection
    assert connection.support_ping() and _on_loop(connection.ping()) == 0
    texts = _on_loop(connection.list())
    assert {key.to_string() for key in (keys[0], keys[2])} <= set(texts) and keys[1].to_string() not in texts
    assert engine.remote.remove(keys[0]) and not engine.remote.remove(keys[0]) and not engine.remote.contains(keys[0])
    for one in [*found, *chunks]:
        one.ref_count_down()
    engine.close()


def engine_memory() -> None:
    """a get for which LMCache has no memory is a miss, waits for nobody and leaks nothing"""
    engine = Engine(config(), metadata())
    keys, chunks = engine.keys(2), [engine.chunk(), engine.chunk()]
    engine.put(keys, chunks)
    held = []
    while (one := engine.local.allocate(chunks[0].get_shapes(), chunks[0].get_dtypes(), busy_loop=False)) is not None:
        held.append(one)
    began = time.monotonic()
    assert engine.remote.batched_get_blocking(keys) == [None, None] and time.monotonic() - began < WAIT_S / 3
    held.pop().ref_count_down()
    one, none = engine.remote.batched_get_blocking(keys)
    assert none is None and torch.equal(one.tensor, chunks[0].tensor)
    for made in [one, *held, *chunks]:
        made.ref_count_down()
    assert engine.local.memory_allocator.memcheck()
    engine.close()


def engine_roots() -> None:
    """an engine of another shape, dtype, chunk size, model, rank, root or tenant finds nothing"""
    writer = Engine(config(), metadata())
    keys, chunk = writer.keys(1), writer.chunk()
    writer.put(keys, [chunk])
    chunk.ref_count_down()
    others: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"kv_shape": (LAYERS, 2, CHUNK, HEADS * 2, WIDTH // 2)}), ({}, {"kv_dtype": torch.float16}),
        ({}, {"kv_shape": (LAYERS + 1, 2, CHUNK, HEADS, WIDTH)}), ({"root": "v2"}, {}), ({"tenant_id": "other"}, {}),
        ({}, {"use_mla": True, "kv_shape": (LAYERS * 2, 1, CHUNK, HEADS, WIDTH)}),
    ]  # fmt: skip
    for extra, facts in others:
        other = Engine(config(**extra), metadata(**facts))
        assert other.remote.batched_contains(keys) == 0, (extra, facts)
        assert other.remote.batched_get_blocking(keys) == [None], (extra, facts)
        other.close()
    for facts in ({"model_name": "org/other"}, {"worker_id": 1, "world_size": 2}):
        other = Engine(config(), metadata(**facts))
        key = CacheEngineKey(
            other.facts.model_name, other.facts.world_size, other.facts.worker_id, keys[0].chunk_hash, torch.bfloat16
        )
        assert other.remote.batched_contains([key]) == 0, facts
        other.close()
    assert writer.remote.batched_contains(keys) == 1
    writer.close()
    assert writer.remote.batched_contains(keys) == 0, "after close"


def their_own_connector() -> None:
    """LMCache's own mooncakestore connector, unmodified, moves chunks on our store, with and without metadata"""
    for with_metadata in (True, False):
        settings = LMCacheEngineConfig.from_dict(
            {
                "chunk_size": CHUNK,
                "local_cpu": False,
                "max_local_cpu_size": 0.02,
                "remote_serde": "naive",
                "remote_url": f"mooncakestore://{ADDRESS.split(',')[0]}/",
                "extra_config": {
                    "local_hostname": "localhost",
                    "metadata_server": "P2PHANDSHAKE",
                    "protocol": "tcp",
                    "master_server_address": ADDRESS,
                    "global_segment_size": 0,
                    "save_chunk_meta": with_metadata,
                    "mooncake_tenant_id": f"own-{with_metadata}",
                    "transfer_timeout": 10,
                },
            }
        )
        writer, reader = Engine(settings, metadata()), Engine(settings, metadata())
        keys, chunks = writer.keys(3), [writer.chunk() for _ in range(3)]
        writer.put(keys, chunks)
        assert [reader.remote.contains(key) for key in [*keys, *reader.keys(1)]] == [True] * 3 + [False]
        found = reader.remote.batched_get_blocking(keys)
        for one, given in zip(found, chunks, strict=True):
            assert one is not None and torch.equal(one.tensor, given.tensor)
        for one in [*found, *chunks]:
            one.ref_count_down()
        writer.close()
        reader.close()


# --- LMCache's server process


SHAPES = [torch.Size([2, LAYERS, CHUNK, HEADS * WIDTH])]
LAYOUT = MemoryLayoutDesc(SHAPES, [torch.bfloat16])


def plugin(**params: Any) -> Any:
    return PluginL2AdapterConfig.from_dict(
        {
            "module_path": "mooncake_rooms.connect.lmcache.l2",
            "class_name": "MooncakeL2",
            "adapter_params": {"nodes": ADDRESS} | params,
        }
    )


def object_keys(count: int, **facts: Any) -> list[Any]:
    given = {"model_name": "org/model", "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0)}
    return [ObjectKey(chunk_hash=uuid.uuid4().bytes, **(given | facts)) for _ in range(count)]


class Level:
    """Our adapter as LMCache's factory makes it, and memory of LMCache for its objects."""

    def __init__(self, **params: Any) -> None:
        self.adapter = create_l2_adapter_from_registry(plugin(**params), None)
        self.memory = TensorMemoryAllocator(torch.zeros(1 << 24, dtype=torch.uint8))

    def objects(self, count: int, shapes: Any = SHAPES) -> list[Any]:
        made = [self.memory.allocate(shapes, [torch.bfloat16], MemoryFormat.KV_2LTD) for _ in range(count)]
        for one in made:
            one.tensor.copy_(torch.randn(shapes[0]).to(torch.bfloat16))
        return made

    def ended(self, fd: int) -> None:
        waiter = poll()
        waiter.register(fd, POLLIN)
        assert waiter.poll(WAIT_S * 1000)
        consume_fd(fd)

    def store(self, keys: Any, objects: Any) -> Any:
        number = self.adapter.submit_store_task(keys, objects)
        self.ended(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[number]

    def look_up(self, keys: Any) -> list[bool]:
        number = self.adapter.submit_lookup_and_lock_task(keys, {0: LAYOUT})
        self.ended(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(number)
        assert self.adapter.query_lookup_and_lock_result(number) is None, "a result is given once"
        self.adapter.submit_unlock(keys)
        return [found.test(i) for i in range(len(keys))]

    def load(self, keys: Any, objects: Any) -> list[bool]:
        number = self.adapter.submit_load_task(keys, objects)
        self.ended(self.adapter.get_load_event_fd())
        found = self.adapter.query_load_result(number)
        return [found.test(i) for i in range(len(keys))]


def adapter_moves() -> None:
    """LMCache's factory makes our second level; tasks end by their event fds, with the right bytes and counts"""
    one, two = Level(), Level()
    fds = [
        fd
        for level in (one.adapter, two.adapter)
        for fd in (level.get_store_event_fd(), level.get_lookup_and_lock_event_fd(), level.get_load_event_fd())
    ]
    assert len(set(fds)) == 6
    keys, objects = object_keys(4), one.objects(4)
    size = objects[0].get_size()
    assert one.look_up(keys) == [False] * 4
    end = one.store(keys[:3], objects[:3])
    assert end.is_successful() and end.bytes_transferred() == 3 * size
    assert one.store(keys[:3], objects[:3]).bytes_transferred() == 0, "nothing new"
    assert two.look_up(keys) == [True, True, True, False]
    room = two.objects(4)
    untouched = room[3].tensor.clone()
    assert two.load(keys, room) == [True, True, True, False]
    for made, given in zip(room[:3], objects[:3], strict=True):
        assert torch.equal(made.tensor, given.tensor)
    assert torch.equal(room[3].tensor, untouched)
    assert one.adapter.get_usage().total_bytes_used == 3 * size
    one.adapter.delete(keys[:2])
    assert two.look_up(keys) == [False, False, True, False]
    assert one.adapter.get_usage().total_bytes_used == size
    assert one.adapter.report_status()["is_healthy"]
    one.adapter.close()
    one.adapter.close()
    two.adapter.close()


def adapter_roots() -> None:
    """an object of another model, rank, group, salt, layout, root or tenant is not found, or is not loaded"""
    level = Level()
    (key,), objects = object_keys(1), level.objects(1)
    assert level.store([key], objects).is_successful()
    facts = {"model_name": "org/other"}, {"kv_rank": 7}, {"object_group_id": 1}, {"cache_salt": "user"}
    same = {"chunk_hash": key.chunk_hash, "model_name": key.model_name, "kv_rank": key.kv_rank}
    assert level.look_up([ObjectKey(**(same | fact)) for fact in facts]) == [False] * 4
    assert level.load([key], level.objects(1, [torch.Size([1, LAYERS, CHUNK, 2 * HEADS * WIDTH])])) == [False]
    assert level.load([key], level.objects(1, [torch.Size([2, LAYERS, CHUNK // 2, HEADS * WIDTH])])) == [False]
    assert level.load([key], level.objects(1)) == [True]
    for params in ({"root": "v2"}, {"tenant_id": "another"}):
        other = Level(**params)
        assert other.look_up([key]) == [False]
        other.adapter.close()
    level.adapter.close()


def managers() -> None:
    """LMCache's storage manager stores through our second level; another one prefetches a prefix from it"""
    names = (f"mooncake_contract_{os.getpid()}_{number}" for number in itertools.count())

    def manager() -> Any:
        memory = L1MemoryManagerConfig(size_in_bytes=8 << 20, use_lazy=False, shm_name=next(names))
        return StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory), EvictionConfig("LRU"), L2AdaptersConfig([plugin(tenant_id="managers")])
            )
        )

    writer, reader = manager(), manager()
    keys = object_keys(4)
    reserved = writer.reserve_write(keys[:3], LAYOUT)
    given = {}
    for key, made in reserved.items():
        made.tensor.copy_(torch.randn(SHAPES[0]).to(torch.bfloat16))
        given[key] = made.tensor.clone()
    writer.finish_write(keys[:3])
    ((_, adapter),) = reader.l2_adapters()
    deadline = time.monotonic() + WAIT_S
    while adapter._client.run(lambda store: store.exist(adapter._names(keys))) != [True] * 3 + [False]:
        assert time.monotonic() < deadline, "the store controller has not stored them"
        time.sleep(0.05)
    handle = reader.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))
    assert reader.wait_prefetch_status(handle, WAIT_S)
    result = reader.query_prefetch_status(handle)
    assert (result.l1_hit_count, result.l2_hit_count) == (0, 3)
    with reader.read_prefetched_results(keys[:3]) as found:
        for key, one in zip(keys, found, strict=False):
            assert torch.equal(one.tensor, given[key])
    reader.finish_read_prefetched(keys[:3])
    writer.close()
    reader.close()


def refusals() -> None:
    """a node that does not exist is an error of our classes"""
    try:
        create_l2_adapter_from_registry(plugin(nodes="127.0.0.1:1"), None)
    except ConnectionError:
        pass
    else:
        raise AssertionError("a second level without a node")
    backends = CreateStorageBackends(config(nodes="127.0.0.1:1"), metadata(), LOOP, "cpu")
    (remote,) = (one for name, one in backends.items() if name != "LocalCPUBackend")
    assert remote.connection is None, "LMCache logs the ConnectionError and goes on without a connection"


def _on_loop(work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, LOOP).result(WAIT_S)


CHECKS: list[Callable[[], None]] = [
    engine_moves, engine_asynchronous, engine_memory, engine_roots, their_own_connector, adapter_moves, adapter_roots,
    managers, refusals,
]  # fmt: skip

if __name__ == "__main__":
    threading.Thread(target=LOOP.run_forever, daemon=True).start()
    failed = run_all(CHECKS)
    sys.stdout.flush()
    os._exit(failed > 0)  # LMCache leaves threads
