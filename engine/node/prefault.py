"""Decides which memory of a node is populated in advance, when, and how much of the machine it may use
(net/transfer/common/prefault.py)."""

from __future__ import annotations

from collections.abc import Callable

from cache.tiers.local_store import LocalStore
from engine.config.machine import free_bytes, total_bytes
from net.transfer.common.memory import Region
from net.transfer.common.prefault import Prefault
from net.transfer.device.staging import DeviceRegion


def prefault(arena: Region | DeviceRegion | None, share: LocalStore | None, busy: Callable[[], bool]) -> Prefault:
    """Populates the arenas in host memory: first the engine's, because all its blocks are written soon, then the
    pool's. A quarter of the RAM stays free, because arenas are upper bounds and may together exceed the host's memory.
    busy(): whether other work needs the cores now."""
    regions = [] if arena is None else [arena]
    regions += [share.arena.region] if share is not None and share.arena is not None else []
    spared = total_bytes() // 4
    return Prefault(
        [region for region in regions if isinstance(region, Region)],
        room=lambda: free_bytes() - spared,
        busy=busy,
    )
