"""This node's share of the pooled store: a DRAM arena and, if a path is given, an SSD tier below it."""

from __future__ import annotations

from pathlib import Path

from cache.arena import Arena
from cache.block import BlockGeometry, BlockKey
from cache.ssd import SsdTier
from cache.tiers.local_store import LocalStore
from cache.tiers.usage import Usage
from engine.config.cache_policies import cache_admission, eviction
from engine.config.config import Config
from engine.config.flags import UsageError
from engine.config.tenants import parse as parse_tenants
from engine.loading.shared_memory import shared_memory
from sched.cost import TransferModel

DRAM_REGION = "dram"
SSD_LATENCY_S, SSD_BYTES_PER_S = 2e-4, 1e9  # assumed before the first measured read


def open_share(config: Config, geometry: BlockGeometry, root: BlockKey) -> LocalStore:
    """Raises SsdError if the path cannot be used, UsageError for an unknown policy, for a quota below one block, or if
    the kernel refuses the memory."""
    policies = eviction(config), cache_admission(config)
    usage = _usage(config, geometry.pool_bytes)
    arena = Arena(shared_memory("--dram-bytes", DRAM_REGION, config.dram_bytes), geometry.pool_bytes)
    ssd = None
    if config.ssd_path is not None:
        path, below = Path(config.ssd_path), eviction(config)
        size, backend = geometry.pool_bytes, config.ssd_backend
        ssd = SsdTier(path, size, config.ssd_bytes, root, below, sync_ms=config.ssd_sync_ms, backend=backend)
    reads = TransferModel(SSD_LATENCY_S, SSD_BYTES_PER_S)
    return LocalStore(arena, ssd, *policies, pin_share=config.pin_share, read_model=reads, usage=usage)


def _usage(config: Config, slot_bytes: int) -> Usage | None:
    """None without --tenants: then no block is counted."""
    try:
        tenants = parse_tenants(config.tenants)
        return Usage(tenants, slot_bytes) if tenants else None
    except ValueError as error:
        raise UsageError(f"--tenants: {error}") from None
