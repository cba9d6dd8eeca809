"""Reports what this machine offers to a node, what is missing, and which path KV would take to a peer. It says how to
get what is missing.

It checks the given flags of a node: --ssd-path, --ssd-bytes, --kv-cache-bytes, --dram-bytes, --rdma-devices, ... Exit
code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from engine.config.config import Config
from engine.config.fits import memory_flags
from engine.config.flags import host_port, parse
from engine.config.net_options import api_key, open_cluster_key, rdma_devices, sealed_only, transport_options
from engine.doctor import compute, memory, paths, rails, rdma, storage, tcp
from engine.doctor.finding import FAIL, WARN, Check, Finding, System, careful
from net.http.client import ClusterError

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


def checks(config: Config) -> dict[str, Check]:
    """Name -> check, in the order of the report."""
    wanted = memory_flags(config)
    pinned = sum(wanted.values())
    return {
        "CPU": compute.cpu,
        "C++ compiler": compute.compiler,
        "OpenMP": compute.openmp,
        "GPU": compute.gpu,
        "memory": partial(memory.free_memory, wanted=wanted),
        "memfd": memory.memfd,
        "/dev/shm": memory.shm,
        "huge pages": memory.huge_pages,
        "LMDB": partial(storage.lmdb_path, ssd_path=config.ssd_path, ssd_bytes=config.ssd_bytes),
        "offload": partial(storage.offload_path, offload=config.offload, folder=config.offload_path),
        "TCP buffers": tcp.buffers,
        "congestion control": tcp.congestion,
        "network": tcp.interfaces,
        "libibverbs": rdma.library,
        "RDMA devices": rdma.devices,
        "rails": partial(rails.rails, wanted=rdma_devices(config), topology_file=config.topology_file),
        "GPUDirect": rails.gpudirect,
        "locked memory": partial(rdma.locked_memory, wanted_bytes=pinned),
    }


def examine(config: Config, system: System, peer: str | None = None) -> list[Finding]:
    """The findings of all checks; the last ones are the paths to peers."""
    findings = [one for name, check in checks(config).items() for one in careful(name, check, system)]
    if peer is None:
        return findings + careful("path", partial(paths.expected, sealed_only=sealed_only(config)), system)
    host, port = host_port(peer)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        options = transport_options(config)
        return findings + asyncio.run(paths.to_peer(address, api_key(config), options, open_cluster_key(config)))
    except ClusterError as error:
        text = str(error).replace("--join", "--peer")
        return [*findings, Finding("peer", FAIL, text, "start a node there, or open its HTTP port")]


def show(findings: Sequence[Finding]) -> str:
    """One line per finding, its remedy below."""
    width = max(len(one.check) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{MARKS[one.status]}  {one.check:<{width}}  {one.found}")
        if one.remedy:
            lines.append(f"{'':<6}{'':<{width}}  -> {one.remedy}")
    bad, slow = (sum(one.status == status for one in findings) for status in (FAIL, WARN))
    return "\n".join([*lines, "", f"{bad} to repair, {slow} to improve"])


def main(argv: Sequence[str]) -> int:
    """Raises UsageError for a wrong flag."""
    parser = argparse.ArgumentParser(prog="mooncake doctor", description=__doc__, add_help=True, allow_abbrev=False)
    parser.add_argument("--peer", metavar="HOST:PORT", help="HTTP address of a running node to try the transports to")
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    own, rest = parser.parse_known_args(list(argv))
    config = parse(rest, ("--peer", "--json"))
    findings = examine(config, System(), own.peer)
    print(json.dumps([asdict(one) for one in findings], indent=2) if own.json else show(findings))
    return int(any(one.status == FAIL for one in findings))
