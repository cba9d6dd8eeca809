"""mooncake.mooncake_config: connect/store/settings.py under upstream's name."""

from __future__ import annotations

from mooncake_rooms.connect.store.settings import MooncakeConfig

__all__ = ["MooncakeConfig"]
