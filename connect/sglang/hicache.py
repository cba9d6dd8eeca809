"""MooncakeHiCache: our pool as the third tier of SGLang's hierarchical cache.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "mooncake-pool",
      "module_path": "mooncake_rooms.connect.sglang.hicache", "class_name": "MooncakeHiCache", "interface_v1": 1,
      "nodes": "127.0.0.1:8000"}'

Pages move between the pool and the addresses of SGLang's host pools; no tensor is made between them. docs/connect/
sglang.md has the other settings. SGLang calls from several threads.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from connect.common.raw_memory import Pieces
from connect.sglang.pages import Pages, Shard, leading, usable
from connect.store import codes
from connect.store.client import Client, answering
from connect.store.settings import Setup

KV = "kv"
no_page = answering(lambda given, code: [False] * len(given[0]))
"""For calls with keys first that answer per page: a pool that fails costs hits, never a request."""
no_pools = answering(lambda given, code: {str(one.name): [False] * len(one.keys or ()) for one in given[0]})


class MooncakeHiCache(HiCacheStorage):
    """One per process of SGLang. Raises ConnectionError if no node answers, ValueError without a model name."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._shard = Shard.of(storage_config, str(extra.get("root") or ""))
        self._direct = bool(extra.get("interface_v1"))
        nodes = str(extra.get("nodes") or extra.get("master_server_address") or os.environ.get("MOONCAKE_MASTER", ""))
        tenant = str(extra.get("tenant_id") or os.environ.get("MOONCAKE_TENANT_ID") or "default")
        self._client = Client()
        if code := self._client.open(Setup.of({"master_server_addr": nodes, "tenant_id": tenant})):
            raise ConnectionError(f"no node of the pool answers at {nodes or 'this host'} (code {code}): see the log")
        self._pools: dict[str, Pages] = {}
        self._flat: Pages | None = None
        self._meter = Meter() if storage_config.enable_storage_metrics else None

    # --- memory

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the KV. One without a buffer only hands out indices: other pools have the bytes."""
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is not None:
            self._pools[KV] = Pages(self._shard, KV, mem_pool_host)
            self._flat = Pages(self._shard, KV, mem_pool_host, "flat")

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool. Raises NotImplementedError for heads of a draft model with MLA: only rank 0 writes them,
        and the other ranks would read its heads."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == KV:
            return
        shard = self._shard
        if name.startswith("draft") and shard.replicated and shard.tp_size > 1 and hasattr(host_pool, "v_buffer"):
            raise NotImplementedError(f"the pool {name} differs between ranks, and SGLang writes it on rank 0 only")
        self._pools[name] = Pages(shard, name, host_pool)

    def _pages(self, name: Any) -> Pages:
        if str(name) not in self._pools:
            raise ValueError(f"the pool {name} is not registered")
        return self._pools[str(name)]

    # --- pages of the KV

    @no_page
    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Per page whether it is now at its indices [pages * page_size] of the host pool."""
        if not keys or KV not in self._pools:
            return [True] * len(keys)
        return self._load(self._pools[KV], keys, host_indices)

    @no_page
    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Per page whether the pool has it now."""
        if not keys or KV not in self._pools:
            return [True] * len(keys)
        return self._save(self._pools[KV], keys, host_indices)

    def _load(self, pages: Pages, keys: Sequence[str], indices: Any) -> list[bool]:
        began = time.perf_counter()
        into = pages.memory(indices, len(keys))
        ends = self._read(pages.names(keys), into)
        if self._meter is not None:
            self._meter.count("prefetch", len(keys), sum(end for end in ends if end > 0), time.perf_counter() - began)
        return pages.whole([end > 0 for end in ends])

    def _save(self, pages: Pages, keys: Sequence[str], indices: Any) -> list[bool]:
        began = time.perf_counter()
        items = list(zip(pages.names(keys), pages.memory(indices, len(keys)), strict=True))
        ends = self._client.run(lambda store: store.put_new(items))
        if self._meter is not None:
            nbytes = sum(value.nbytes for (_, value), end in zip(items, ends, strict=True) if end == codes.OK)
            self._meter.count("backup", len(keys), nbytes, time.perf_counter() - began)
        return pages.whole([end in (codes.OK, codes.EXISTS) for end in ends])

    def _read(self, names: list[str], into: Sequence[Pieces]) -> list[int]:
        def target(i: int, nbytes: int) -> Pieces | int:
            return into[i] if into[i].nbytes == nbytes else codes.INVALID

        return self._client.run(lambda store: store.get(names, target))

    @answering(lambda given, code: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """The number of leading pages that are there."""
        pages = self._pools.get(KV) if self._direct else self._flat
        return 0 if pages is None or not keys else leading(self._present(pages, keys))

    def _present(self, pages: Pages, keys: Sequence[str]) -> list[bool]:
        names = pages.names(keys)
        return pages.whole(self._client.run(lambda store: store.exist(names)))

    # --- several pools

    @answering(lambda given, code: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """A PoolTransferResult. Raises nothing: an unknown pool or policy is a miss, and the log has it."""
        kv_pages = self.batch_exists(keys, extra_info) if KV in self._pools else len(keys)
        present: dict[str, list[bool]] = {}
        trailing: dict[str, int] = {}
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing[transfer.name] = len(transfer.keys or ())
            elif transfer.hit_policy != PoolHitPolicy.ALL_PAGES:
                raise ValueError(f"the policy {transfer.hit_policy} of the pool {transfer.name} is not known")
            if kv_pages:
                present[transfer.name] = self._present(self._pages(transfer.name), keys[:kv_pages])
        hits, restorable = usable(kv_pages, present, trailing)
        return PoolTransferResult(max(restorable, default=0), ({KV: kv_pages} if kv_pages else {}) | hits, restorable)

    @no_pools
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Per pool and page whether it is now at its indices of that host pool."""
        rows = [(one.name, one.keys, one.host_indices) for one in transfers if one.keys]
        return {name: self._load(self._pages(name), keys, indices) for name, keys, indices in rows}

    @no_pools
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Per pool and page whether the pool of ours has it now."""
        rows = [(one.name, one.keys, one.host_indices) for one in transfers if one.keys]
        return {name: self._save(self._pages(name), keys, indices) for name, keys, indices in rows}

    # --- pages as tensors, which SGLang copies itself: without "interface_v1"

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """`target_location` (a tensor) with the page in it; None if it is missing or has another length."""
        return self.batch_get([key], [target_location])[0]

    @answering(lambda given, code: [None] * len(given[0]))
    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        ends = self._read(self._flat_names(keys), [_memory(tensor) for tensor in target_locations])
        return [tensor if end > 0 else None for tensor, end in zip(target_locations, ends, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Whether the pool has the page, a tensor, now."""
        return self.batch_set([key], [value])

    @answering(lambda given, code: False)
    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        items = list(zip(self._flat_names(keys), map(_memory, values), strict=True))
        return not any(self._client.run(lambda store: store.put(items)))

    @answering(lambda given, code: False)
    def exists(self, key: str) -> bool:
        """Whether the page is there, in either form."""
        forms = [pages for pages in (self._flat, self._pools.get(KV)) if pages is not None]
        return any(self._present(pages, [key])[0] for pages in forms)

    def _flat_names(self, keys: Sequence[str]) -> list[str]:
        if self._flat is None or self._flat.values > 1:
            raise ValueError('pages as tensors need a host pool with one value per page: set "interface_v1": 1')
        return self._flat.names(keys)

    # --- life

    def clear(self) -> None:
        """Remove the pages of this model, of all ranks."""
        pattern = re.compile("^" + re.escape(self._shard.root + "/"))
        self._client.run(lambda store: store.remove_matching(pattern))

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call; None if they were not asked for."""
        return None if self._meter is None else self._meter.take()

    def close(self) -> None:
        """Idempotent."""
        self._client.close()


def _memory(tensor: Any) -> Pieces:
    """Raises ValueError for a tensor in several pieces or on a device."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a page must be one piece of memory of the host, not {tensor.shape} on {tensor.device}")
    return Pieces([(tensor.data_ptr(), tensor.nbytes)], tensor)


class Meter:
    """What SGLang's metrics of its storage need: pages, and gigabytes per second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[tuple[str, int, float]] = []

    def count(self, what: str, pages: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._rows.append((what, pages, nbytes / (1 << 30) / max(seconds, 1e-9)))

    def take(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            rows, self._rows = self._rows, []
        made = StorageMetrics()
        for what, pages, rate in rows:
            getattr(made, f"{what}_pgs").append(pages)
            getattr(made, f"{what}_bandwidth").append(rate)
        return made
