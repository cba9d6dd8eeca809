"""This node's share of the pooled store: a DRAM arena, and an SSD tier below it where a path was given."""

from __future__ import annotations

from pathlib import Path

from cache.arena import Arena
from cache.block import BlockGeometry, BlockKey
from cache.ssd import SsdTier
from cache.tiers import LocalStore
from engine.config import Config
from engine.kv.cache_policies import cache_admission, eviction
from net.memory import Region

DRAM_REGION = "dram"


def open_share(config: Config, geometry: BlockGeometry, root: BlockKey) -> LocalStore:
    """Raises SsdError when the path cannot be used, UsageError for a policy that is not there."""
    policies = eviction(config), cache_admission(config)
    arena = Arena(Region.shared(DRAM_REGION, config.dram_bytes), geometry.pool_bytes)
    ssd = None
    if config.ssd_path is not None:
        path, below = Path(config.ssd_path), eviction(config)
        size, backend = geometry.pool_bytes, config.ssd_backend
        ssd = SsdTier(path, size, config.ssd_bytes, root, below, sync_ms=config.ssd_sync_ms, backend=backend)
    return LocalStore(arena, ssd, *policies, pin_share=config.pin_share)
