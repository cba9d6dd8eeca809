"""SGLang loads our storage class, and runs its own Mooncake class on our module.

    python sglang_program.py ADDRESS     in an interpreter with sglang (--no-deps), torch and our package

The host pools are SGLang's own classes on memory of this process; there is no model and no GPU. torchvision's wheel has
its operators for CUDA only, and SGLang imports it for images: two operators are declared here so that the import works.
"""

from __future__ import annotations

import importlib
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

import torch

ADDRESS = sys.argv[1]
if __name__ == "__main__":
    declared = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        declared.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from checks import run_all  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

PAGE, LAYERS, HEADS, WIDTH, PAGES = 4, 3, 2, 16, 24
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LOADED = {
    "backend_name": "mooncake-pool",
    "module_path": "mooncake_rooms.connect.sglang.hicache",
    "class_name": "MooncakeHiCache",
    "interface_v1": 1,
    "nodes": ADDRESS,
}


def mha(layout: str = "page_first", heads: int = HEADS) -> Any:
    """A host pool of keys and values, with random content."""
    device = [torch.zeros(PAGE * 2, heads, WIDTH) for _ in range(2 * LAYERS)]
    pointers = torch.zeros(LAYERS, dtype=torch.uint64)
    keys, values = tuple(device[:LAYERS]), tuple(device[LAYERS:])
    buffers = KVBuffers(k=keys, v=values, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=heads, head_dim=WIDTH, v_head_dim=WIDTH,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    return _filled(MHATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, **_room()))


def mla(layout: str = "page_first") -> Any:
    """A host pool of latents, with random content."""
    info = MLABufferInfo(
        buffers=tuple(torch.zeros(PAGE * 2, 1, 24) for _ in range(LAYERS)),
        data_ptrs=torch.zeros(LAYERS, dtype=torch.uint64), layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    return _filled(MLATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, target_layer_num=LAYERS, **_room()))


def _room() -> dict[str, Any]:
    tokens = PAGE * PAGES
    return {
        "pin_memory": False, "device_capacity_tokens": PAGE * 2, "start_layer": 0, "end_layer": LAYERS,
        "host_token_capacity": tokens,
    }  # fmt: skip


def _filled(pool: Any) -> Any:
    pool.kv_buffer.copy_(torch.rand_like(pool.kv_buffer))
    return pool


def opened(pool: Any = None, **facts: Any) -> Any:
    """Our class as SGLang's factory makes it; `extra` adds to the configuration of the user."""
    extra = LOADED | facts.pop("extra", {})
    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True,
        "model_name": "org/model", "extra_config": extra,
    }  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**(given | facts)), pool)
    if pool is not None:
        made.register_mem_pool_host(pool)
        made.on_host_pools_registered()
    return made


def hashes(count: int) -> list[str]:
    return [uuid.uuid4().hex for _ in range(count)]


def indices(*pages: int) -> Any:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def content(pool: Any, *pages: int) -> Any:
    """The KV of those pages, in SGLang's own order."""
    return torch.stack([pool.get_data_page(page * PAGE, flat=True) for page in pages])


def moved(writer: Any, source: Any, reader: Any, target: Any, count: int = 5) -> list[str]:
    """Pages 0.. of one host pool through the pool to pages 9.. of the other; their hashes. Checks every byte."""
    keys = hashes(count)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys, indices(*range(count))) == [True] * count
    assert reader.batch_exists([*keys, *hashes(1)]) == count
    before = content(target, 8, 9 + count)
    assert reader.batch_get_v1(keys, indices(*range(9, 9 + count))) == [True] * count
    assert torch.equal(content(source, *range(count)), content(target, *range(9, 9 + count)))
    assert torch.equal(before, content(target, 8, 9 + count)), "a page next to them changed"
    return keys


def loads() -> None:
    """the factory loads our class by module_path and class_name"""
    made = opened()
    assert isinstance(made, HiCacheStorage) and type(made).__name__ == LOADED["class_name"]
    made.close()
    made.close()


def layouts() -> None:
    """pages of SGLang's MHA host pool move in all four layouts, to the host pool of another client"""
    for layout in LAYOUTS:
        source, target = mha(layout), mha(layout)
        writer, reader = opened(source), opened(target)
        keys = moved(writer, source, reader, target)
        assert writer.batch_set_v1(keys, indices(*range(5))) == [True] * 5, "a second set of the same pages"
        writer.close()
        reader.close()


def latents() -> None:
    """latents of SGLang's MLA host pool are written by one rank and read by another"""
    for layout in LAYOUTS[:3]:
        source, target = mla(layout), mla(layout)
        writer = opened(source, is_mla_model=True, tp_size=4)
        reader = opened(target, is_mla_model=True, tp_size=4, tp_rank=3)
        moved(writer, source, reader, target)
        writer.close()
        reader.close()


def roots() -> None:
    """another model, rank, stage, layout, root or tenant finds nothing"""
    writer = opened(mha(), tp_size=2)
    keys = hashes(2)
    assert writer.batch_set_v1(keys, indices(0, 1)) == [True, True]
    same = opened(mha(), tp_size=2)
    assert same.batch_exists(keys) == 2
    others: list[tuple[Any, dict[str, Any]]] = [
        (mha(), {"tp_size": 2, "model_name": "org/other"}), (mha(), {"tp_size": 2, "tp_rank": 1}), (mha(), {}),
        (mha(), {"tp_size": 2, "pp_size": 2}), (mha(), {"tp_size": 2, "attn_cp_size": 2}),
        (mha("layer_first"), {"tp_size": 2}), (mha(heads=4), {"tp_size": 2}),
        (mha(), {"tp_size": 2, "extra": {"root": "v2"}}), (mha(), {"tp_size": 2, "extra": {"tenant_id": "other"}}),
    ]  # fmt: skip
    for pool, facts in others:
        other = opened(pool, **facts)
        before = pool.kv_buffer.clone()
        assert other.batch_exists(keys) == 0, facts
        assert other.batch_get_v1(keys, indices(0, 1)) == [False, False], facts
        assert torch.equal(before, pool.kv_buffer), "a miss wrote"
        other.close()
    writer.close()
    same.close()


def heads() -> None:
    """a server with two ranks reads the heads that one with a single rank wrote (tp_lcm_size), and the reverse"""
    whole, halves = mha("page_head", 2), [mha("page_head", 1) for _ in range(2)]
    one = opened(whole, tp_lcm_size=2, should_split_heads=True)
    two = [opened(pool, tp_lcm_size=2, tp_size=2, tp_rank=rank) for rank, pool in enumerate(halves)]
    keys = hashes(3)
    assert one.batch_set_v1(keys, indices(0, 1, 2)) == [True] * 3
    for rank, (half, pool) in enumerate(zip(two, halves, strict=True)):
        assert half.batch_exists(keys) == 3
        assert half.batch_get_v1(keys, indices(4, 5, 6)) == [True] * 3
        assert torch.equal(pool.kv_buffer[:, 4:7, 0], whole.kv_buffer[:, 0:3, rank])
    more = hashes(2)
    assert two[0].batch_set_v1(more, indices(0, 1)) == [True, True]
    assert one.batch_exists(more) == 0, "a page with one of its two halves"
    assert one.batch_get_v1(more, indices(7, 8)) == [False, False]
    assert two[1].batch_set_v1(more, indices(0, 1)) == [True, True]
    assert one.batch_get_v1(more, indices(7, 8)) == [True, True]
    assert torch.equal(whole.kv_buffer[:, 7:9, 1], halves[1].kv_buffer[:, 0:2, 0])
    for made in (one, *two):
        made.close()


def tensors() -> None:
    """pages as tensors: set, exists, get and their batch forms, without interface_v1"""
    pool = mha("layer_first")
    made = opened(pool, extra={"interface_v1": 0})
    keys = hashes(3)
    pages = [pool.get_data_page(i * PAGE) for i in range(3)]
    assert made.set(keys[0], pages[0]) and made.exists(keys[0]) and not made.exists(keys[1])
    assert made.batch_set(keys, pages)
    assert made.batch_exists([*keys, *hashes(1)]) == 3
    blank = [pool.get_dummy_flat_data_page() for _ in range(4)]
    got = made.batch_get([*keys, *hashes(1)], blank)
    assert got[3] is None
    for i in range(3):
        pool.set_from_flat_data_page((10 + i) * PAGE, got[i])
    assert torch.equal(content(pool, 0, 1, 2), content(pool, 10, 11, 12))
    assert made.get(keys[0], torch.zeros(3)) is None, "a page of another length"
    made.close()


def several_pools() -> None:
    """the v2 calls move a second pool, and find prefixes by all pages or by trailing pages"""
    kv, window = mha(), mha(heads=1)
    made = opened(kv)
    made.register_mem_host_pool_v2(kv, PoolName.KV)
    made.register_mem_host_pool_v2(window, PoolName.SWA)
    keys = hashes(6)
    assert made.batch_set_v1(keys, indices(*range(6))) == [True] * 6
    there = PoolTransfer(name=PoolName.SWA, host_indices=indices(0, 1, 2), keys=[keys[i] for i in (0, 1, 4)])
    assert made.batch_set_v2([there]) == {PoolName.SWA: [True] * 3}

    def found(policy: Any, last: int = 0) -> Any:
        return made.batch_exists_v2(keys, [PoolTransfer(name=PoolName.SWA, keys=keys[6 - last :], hit_policy=policy)])

    every = found(PoolHitPolicy.ALL_PAGES)
    assert (every.kv_hit_pages, every.restorable_prefix_pages) == (2, [1, 2])
    assert every.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 2}
    one = found(PoolHitPolicy.TRAILING_PAGES, 1)
    assert (one.kv_hit_pages, one.restorable_prefix_pages) == (5, [1, 2, 5])
    two = found(PoolHitPolicy.TRAILING_PAGES, 2)
    assert (two.kv_hit_pages, two.restorable_prefix_pages) == (2, [1, 2])
    back = PoolTransfer(name=PoolName.SWA, host_indices=indices(10, 11, 12), keys=[keys[4], keys[5], keys[0]])
    assert made.batch_get_v2([back]) == {PoolName.SWA: [True, False, True]}
    assert torch.equal(content(window, 10, 12), content(window, 2, 0))
    assert made.batch_get_v2([PoolTransfer(name=PoolName.MAMBA, host_indices=indices(0), keys=keys[:1])]) == {
        PoolName.MAMBA: [False]
    }, "a pool that is not registered"
    made.close()


def refusals() -> None:
    """a wrong number of indices moves nothing; a node that does not exist and a missing model name are errors"""
    pool = mha()
    made = opened(pool)
    keys = hashes(2)
    assert made.batch_set_v1(keys, indices(0)) == [False, False]
    assert made.batch_exists(keys) == 0
    assert made.batch_get_v1([], indices(0)[:0]) == []
    made.close()
    assert made.batch_get_v1(keys, indices(0, 1)) == [False, False], "after close"
    assert _raises(lambda: opened(extra={"nodes": "127.0.0.1:1"}), ConnectionError)
    assert _raises(lambda: opened(model_name=None), ValueError)
    draft = opened(mla(), is_mla_model=True, tp_size=2)
    assert _raises(lambda: draft.register_mem_host_pool_v2(mha(), PoolName.DRAFT), NotImplementedError)
    draft.close()


def _raises(work: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        work()
    except kind:
        return True
    return False


def clears() -> None:
    """clear removes the pages of this model only; get_stats has what was moved"""
    mine, other = opened(mha(), model_name="org/cleared"), opened(mha())
    keys = hashes(3)
    assert all(mine.batch_set_v1(keys, indices(0, 1, 2))) and all(other.batch_set_v1(keys, indices(0, 1, 2)))
    assert all(mine.batch_get_v1(keys, indices(3, 4, 5)))
    stats = mine.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3]) and stats.prefetch_bandwidth[0] > 0
    assert mine.get_stats().backup_pgs == []
    mine.clear()
    assert (mine.batch_exists(keys), other.batch_exists(keys)) == (0, 3)
    mine.close()
    other.close()


def their_own_class() -> None:
    """SGLang's own MooncakeStore, unmodified, passes its own test file on our mooncake.store"""
    os.environ |= {"MOONCAKE_MASTER": ADDRESS, "MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0"}
    own = importlib.import_module("sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store")
    own.test_single_operation()
    for latent, rank, size in ((False, 0, 1), (True, 0, 1), (False, 1, 4), (True, 3, 8)):
        config = own.make_hicache_storage_config(is_mla_model=latent, tp_rank=rank, tp_size=size)
        own.test_batch_operation(config)


def their_own_class_and_pools() -> None:
    """SGLang's own MooncakeStore moves pages of its real host pools on our mooncake.store"""
    store = importlib.import_module("sglang.srt.mem_cache.storage.mooncake_store.mooncake_store").MooncakeStore
    for make, latent in ((mha, False), (mla, True)):
        source, target = make("page_first"), make("page_first")
        made = []
        for pool in (source, target):
            config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, latent, False, True, "org/model")
            made.append(store(config, pool))
            made[-1].register_mem_pool_host(pool)
        moved(made[0], source, made[1], target)


CHECKS = [
    loads, layouts, latents, roots, heads, tensors, several_pools, refusals, clears, their_own_class,
    their_own_class_and_pools,
]  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_all(CHECKS) > 0)
