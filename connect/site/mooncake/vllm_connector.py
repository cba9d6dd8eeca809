"""mooncake.vllm_connector: connect/vllm/connector.py under a short name, for vLLM's kv_connector_module_path."""

from __future__ import annotations

from mooncake_rooms.connect.vllm.connector import PoolConnector

__all__ = ["PoolConnector"]
