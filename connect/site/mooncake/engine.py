"""mooncake.engine: connect/engine/transfer_engine.py under upstream's name."""

from __future__ import annotations

from mooncake_rooms.connect.engine.transfer_engine import TransferEngine, TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
