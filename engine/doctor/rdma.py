"""RDMA: library, devices, ports, addresses, and the memory that they may pin."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable

from engine.doctor.finding import FAIL, OK, WARN, Finding, System, size
from net.transfer.rdma.places import numa_node

DEVICES = "sys/class/infiniband"
MTUS = (256, 512, 1024, 2048, 4096)
ROCE_HEADER_BYTES = 58  # of a packet in addition to the payload; both must fit into the interface's MTU
ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def library(system: System, load: Callable[[str], object] = ctypes.CDLL) -> list[Finding]:
    """The shared library, which is needed only with devices."""
    needed = bool(system.names(DEVICES))
    try:
        load("libibverbs.so.1")
    except OSError:
        found = "libibverbs is not installed" + ("" if needed else "; not needed without an RDMA device")
        remedy = "apt install libibverbs-dev ibverbs-providers gcc" if needed else ""
        return [Finding("libibverbs", WARN if needed else OK, found, remedy)]
    return [Finding("libibverbs", OK, "libibverbs.so.1 loads")]


def devices(system: System) -> list[Finding]:
    """One finding per device: port, rate, addresses, MTU, NUMA node."""
    names = system.names(DEVICES)
    if not names:
        remedy = "a NIC with RoCE or InfiniBand; for tests on any NIC: modprobe rdma_rxe, rdma link add"
        return [Finding("RDMA devices", WARN, "none in /sys/class/infiniband", remedy)]
    return [_device(system, name) for name in names]


def _device(system: System, name: str) -> Finding:
    port = f"{DEVICES}/{name}/ports/1"
    state, layer = system.read(f"{port}/state"), system.read(f"{port}/link_layer") or "unknown link"
    about = f"{layer}, {system.read(f'{port}/rate') or 'unknown rate'}, port {state or 'unknown'}"
    if "ACTIVE" not in state:
        return Finding(name, WARN, about, f"bring the link up: ip link set dev {_interface(system, name)} up; cable?")
    gids = _gids(system, port)
    if layer == "Ethernet" and not gids:
        remedy = f"give its interface {_interface(system, name)} an IP address"
        return Finding(name, WARN, f"{about}, no address (GID)", remedy)
    mtu = _mtu(system, name)
    node = numa_node(system.root / DEVICES / name / "device")
    about += f", {len(gids)} GIDs ({', '.join(sorted(set(gids.values())))})" if gids else ""
    about += f", NUMA node {node}" if node >= 0 else ""
    if mtu is not None and mtu < MTUS[-1]:
        remedy = f"ip link set dev {_interface(system, name)} mtu 4200 or more, on every node and switch on the way"
        return Finding(name, WARN, f"{about}, packets of {mtu} bytes", remedy)
    return Finding(name, OK, about + (f", packets of {mtu} bytes" if mtu else ""))


def _interface(system: System, name: str) -> str:
    """The network interface under a RoCE device."""
    interfaces = system.names(f"{DEVICES}/{name}/device/net")
    return interfaces[0] if interfaces else system.read(f"{DEVICES}/{name}/parent") or "of the device"


def _gids(system: System, port: str) -> dict[str, str]:
    """Index -> type of the addresses that are set."""
    known = {}
    for index in system.names(f"{port}/gids"):
        if system.read(f"{port}/gids/{index}") not in ("", ZERO_GID):
            known[index] = system.read(f"{port}/gid_attrs/types/{index}") or "unknown type"
    return known


def _mtu(system: System, name: str) -> int | None:
    """The largest RDMA packet that the interface's MTU allows; None for InfiniBand and if the MTU is unknown."""
    text = system.read(f"sys/class/net/{_interface(system, name)}/mtu")
    if not text.isdigit():
        return None
    return max((mtu for mtu in MTUS if mtu + ROCE_HEADER_BYTES <= int(text)), default=MTUS[0])


def locked_memory(system: System, wanted_bytes: int = 0) -> list[Finding]:
    """The limit of locked memory: RDMA pins the KV arena and the DRAM share."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return [Finding("locked memory", OK, "unlimited")]
    found = f"at most {size(limit)} may be pinned"
    if not system.names(DEVICES):
        return [Finding("locked memory", OK, f"{found}; only RDMA pins memory")]
    status = FAIL if limit < wanted_bytes else WARN
    return [Finding("locked memory", status, found, "ulimit -l unlimited (memlock in /etc/security/limits.conf)")]
