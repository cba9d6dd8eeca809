"""Converts a Config to the options of net/: transports, the cluster key, the API keys."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from engine.config.config import Config
from engine.config.flags import UsageError
from net.channel import congestion
from net.channel.cluster_key import ClusterKey, KeyFileError
from net.codec.exponents import KINDS, Exponents
from net.compiled import NotCompiled
from net.http.common.keys import ApiKeyFileError, ApiKeys, key_to_send
from net.rounds.door import Door
from net.rounds.rdma.ways import Ways
from net.transfer.engine import transports
from net.transfer.rdma import places
from net.transfer.tcp.coding import Coding

log = logging.getLogger(__name__)

TRANSPORTS = {"auto": tuple(transports)} | {name: (name,) for name in transports}


def rdma_devices(config: Config) -> list[str]:
    """The names in --rdma-devices; empty: all devices."""
    return [] if config.rdma_devices == "auto" else [name.strip() for name in config.rdma_devices.split(",")]


def sealed_only(config: Config) -> bool:
    """Whether bytes may leave this host only encrypted; RDMA does not encrypt."""
    return config.cluster_key_file is not None and not config.rdma_plaintext


def transport_options(config: Config) -> dict[str, dict[str, Any]]:
    """The arguments of each transport's constructor. Raises UsageError for a wrong --topology-file, --tcp-congestion
    or --wire-codec."""
    try:
        congestion.check(config.tcp_congestion)
    except ValueError as error:
        raise UsageError(str(error)) from None
    tcp = {
        "connections": config.tcp_connections,
        "busy_poll_us": config.tcp_busy_poll_us,
        "congestion": config.tcp_congestion,
        "coding": _coding(config),
    }
    return {"rdma": _rdma_options(config), "tcp": tcp}


def rank_ways(config: Config) -> Ways:
    """How messages may go to ranks with experts on other hosts. Raises UsageError for a wrong --topology-file."""
    return Ways(config.transport, **_rdma_options(config))


def _rdma_options(config: Config) -> dict[str, Any]:
    try:
        overrides = places.overrides(config.topology_file)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return {
        "devices": rdma_devices(config),
        "gid_index": None if config.rdma_gid_index < 0 else config.rdma_gid_index,
        "overrides": overrides,
        "sealed_only": sealed_only(config),
    }


def _coding(config: Config) -> Coding | None:
    """The coder of --wire-codec. Raises UsageError where `exponent` cannot be."""
    dtype, always = config.kv_cache_dtype, config.wire_codec == "exponent"
    if config.wire_codec == "none":
        return None
    if dtype not in KINDS and always:
        raise UsageError(f"--wire-codec exponent: KV in {dtype} has no exponents to code; give --wire-codec none")
    try:
        return Coding(Exponents(dtype), always, config.rail_limit) if dtype in KINDS else None
    except NotCompiled as error:
        if always:
            raise UsageError(f"--wire-codec exponent: {error}; or give --wire-codec none") from None
        log.warning("--wire-codec auto codes nothing: %s", error)
        return None


def open_cluster_key(config: Config) -> ClusterKey | None:
    """The cluster key, the same object for all callers in this process. Raises UsageError."""
    if config.cluster_key_file is None:
        return None
    try:
        return _open(Path(config.cluster_key_file))
    except KeyFileError as error:
        raise UsageError(str(error)) from None


@cache
def _open(path: Path) -> ClusterKey:
    return ClusterKey(path)


def open_expert_door(config: Config) -> Door:
    """Where the ranks with experts join that are no children of the node. Raises UsageError."""
    try:
        return Door(config.host, config.expert_port)
    except OSError as error:
        raise UsageError(
            f"--expert-port {config.expert_port} on {config.host}: {error.strerror or error}; give another one, or "
            "0 for any"
        ) from None


def api_key(config: Config) -> str | None:
    """The key that this node sends to the node it joins. Raises UsageError."""
    try:
        return key_to_send(config.api_key, _key_file(config))
    except ApiKeyFileError as error:
        raise UsageError(str(error)) from None


def api_keys(config: Config) -> ApiKeys:
    """The keys that this node accepts. Raises UsageError."""
    try:
        return ApiKeys(config.api_key, _key_file(config))
    except ApiKeyFileError as error:
        raise UsageError(str(error)) from None


def _key_file(config: Config) -> Path | None:
    return None if config.api_key_file is None else Path(config.api_key_file).expanduser()
