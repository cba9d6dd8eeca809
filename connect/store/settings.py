"""The settings that engines give: setup's arguments in all their forms, and MooncakeConfig."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEGMENT_BYTES = 3355443200
BUFFER_BYTES = 1 << 30
UNITS = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
UNITS |= {"t": 1 << 40, "b": 1}

SPELLINGS = {"master_server_address": "master_server_addr", "device_name": "rdma_devices"}
"""Keys of the same meaning: LMCache's, and upstream's."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What our store uses of setup's arguments."""

    local_hostname: str
    master_server_addr: str
    segment_bytes: int
    tenant: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Setup:
        """From arguments by name, or from a dict whose values may be strings; unknown keys are ignored. Raises
        ValueError for a size that is none."""
        named = {SPELLINGS.get(key, key): value for key, value in given.items()}
        return cls(
            local_hostname=str(named.get("local_hostname") or "localhost"),
            master_server_addr=str(named.get("master_server_addr") or ""),
            segment_bytes=size_of(named.get("global_segment_size") or 0),
            tenant=str(named.get("tenant_id") or "default"),
        )


def size_of(value: Any) -> int:
    """Bytes: 4096, '4096', '80GB', '1.5 g'. Raises ValueError."""
    if not isinstance(value, str):
        return int(value)
    text = value.strip().lower()
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(float(text))


def _truth(value: Any) -> bool:
    """Raises ValueError for a text that is neither yes nor no."""
    if not isinstance(value, str):
        return bool(value)
    text = value.strip().lower()
    if text in ("true", "1", "yes", "on", "enable"):
        return True
    if text in ("", "false", "0", "no", "off", "disable"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


@dataclass
class MooncakeConfig:
    """Upstream's configuration: the same attributes, file and environment variables. Raises ValueError for an empty
    name, an empty protocol or a negative size."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self) -> None:
        for name in ("protocol", "local_hostname", "metadata_server", "master_server_address"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be a text, got {value!r}")
        self.protocol = self.protocol.strip().lower()
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is negative: {getattr(self, name)}")

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """From a JSON file. Raises ValueError for a missing field, OSError."""
        given = json.loads(Path(file_path).read_text())
        for name in ("local_hostname", "metadata_server", "master_server_address"):
            if name not in given:
                raise ValueError(f"{file_path} lacks {name}")
        return _config(given)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """From the file of MOONCAKE_CONFIG_PATH, or from MOONCAKE_MASTER and its companions. Raises ValueError if
        neither is set."""
        if path := os.environ.get("MOONCAKE_CONFIG_PATH"):
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError("neither MOONCAKE_CONFIG_PATH nor MOONCAKE_MASTER is set")
        given = {name: os.environ[variable] for name, variable in VARIABLES.items() if variable in os.environ}
        return _config({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"} | given)


VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


def _config(given: Mapping[str, Any]) -> MooncakeConfig:
    return MooncakeConfig(
        local_hostname=given["local_hostname"],
        metadata_server=given["metadata_server"],
        global_segment_size=size_of(given.get("global_segment_size", SEGMENT_BYTES)),
        local_buffer_size=size_of(given.get("local_buffer_size", BUFFER_BYTES)),
        protocol=given.get("protocol", "tcp"),
        device_name=given.get("device_name", ""),
        master_server_address=given["master_server_address"],
        enable_ssd_offload=_truth(given.get("enable_ssd_offload", False)),
        ssd_offload_path=str(given.get("ssd_offload_path") or ""),
        tenant_id=str(given.get("tenant_id") or "default"),
        enable_client_http_server=_truth(given.get("enable_client_http_server", False)),
        client_http_port=int(given.get("client_http_port", 9300)),
    )
