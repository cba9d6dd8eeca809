"""The settings of vLLM's two connectors of upstream: MooncakeStoreConnector and MooncakeConnector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ALONE = ("--enable-prompt-tokens-details",)
"""Flags of every vLLM here: answers say how much of a prompt was cached."""

BUFFER_BYTES = 512 << 20
"""Upstream's transfer buffer in a process; ours needs none."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one vLLM process is given in addition to its model."""

    flags: tuple[str, ...] = ALONE
    env: Mapping[str, str] = field(default_factory=dict)


def store_connector(packages: Path, config: Path, lookup_port: int) -> Settings:
    """MooncakeStoreConnector. `packages`: the folder that has `mooncake.store`; `config`: from `write_store_config`;
    `lookup_port`: another number for each vLLM of a host, because it names the socket between two of its processes."""
    transfer = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"load_async": True, "lookup_rpc_port": lookup_port},
    }
    env = {"PYTHONPATH": str(packages), "MOONCAKE_CONFIG_PATH": str(config)}
    return Settings((*ALONE, "--kv-transfer-config", json.dumps(transfer)), env)


def write_store_config(path: Path, master: str, segment_bytes: int) -> None:
    """The file of MOONCAKE_CONFIG_PATH. `master`: upstream's master, or nodes of ours, separated by commas.
    `segment_bytes`: memory of each vLLM that joins the pool; 0 = none."""
    mode = "embedded" if segment_bytes else "standalone-store"
    config = {"metadata_server": "P2PHANDSHAKE", "master_server_address": master, "protocol": "tcp", "mode": mode}
    config |= {"global_segment_size": str(segment_bytes) + "b", "local_buffer_size": str(BUFFER_BYTES) + "b"}
    path.write_text(json.dumps(config, indent=1) + "\n")


def pair_connector(packages: Path, producer: bool, bootstrap_port: int) -> Settings:
    """MooncakeConnector of the process that computes prompts (`producer`), which listens at `bootstrap_port`, or of the
    one that decodes."""
    transfer = {
        "kv_connector": "MooncakeConnector",
        "kv_role": "kv_producer" if producer else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    env = {"PYTHONPATH": str(packages), "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port)}
    return Settings((*ALONE, "--kv-transfer-config", json.dumps(transfer)), env)
