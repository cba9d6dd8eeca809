"""Which memory of a node is populated ahead, when, and how much of the machine it may take (net/prefault.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.tiers import LocalStore
from engine.machine import free_bytes, total_bytes
from net.memory import Region
from net.prefault import Prefault

if TYPE_CHECKING:
    from engine.engine import Engine


def prefault(engine: Engine | None, share: LocalStore | None) -> Prefault:
    """Of the arenas in host memory: the engine's, whose every block is written first, then the pool's. A quarter of
    the RAM stays free: arenas are upper bounds, and nodes of one host may have been given more than there is."""
    regions = [engine.region] if engine is not None else []
    regions += [share.arena.region] if share is not None and share.arena is not None else []
    spared = total_bytes() // 4
    return Prefault(
        [region for region in regions if isinstance(region, Region)],
        room=lambda: free_bytes() - spared,
        busy=lambda: engine is not None and engine.is_busy(),
    )
