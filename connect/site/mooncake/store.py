"""mooncake.store: connect/store/distributed_store.py under upstream's name."""

from __future__ import annotations

from mooncake_rooms.connect.store.distributed_store import BufferHandle, MooncakeDistributedStore
from mooncake_rooms.connect.store.replicate_config import ReplicateConfig

__all__ = ["BufferHandle", "MooncakeDistributedStore", "ReplicateConfig"]
