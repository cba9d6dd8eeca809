"""The locations of cards, GPUs and memory on this machine, from the kernel, for net/transfer/common/topology.py."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from net.transfer.common.memory import Region
from net.transfer.common.topology import NEAR, Nic, Overrides, Topology, parse

SYS = Path("/sys")
PCI_ADDRESS = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
NODE_OF_ADDRESS = 3  # MPOL_F_NODE | MPOL_F_ADDR


def nics(names: Sequence[str], sys: Path = SYS) -> list[Nic]:
    """The RDMA devices of these names; facts that the kernel does not report stay unknown."""
    return [_nic(name, sys / "class" / "infiniband" / name / "device") for name in names]


def _nic(name: str, device: Path) -> Nic:
    return Nic(name, numa_node(device), bridges(device))


def numa_node(device: Path) -> int:
    """The NUMA node of a device's folder in sysfs; -1 if the kernel does not report it."""
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def bridges(device: Path) -> tuple[str, ...]:
    """PCI addresses from the root complex down to the device; empty if it is not on a PCI bus."""
    return tuple(part for part in device.resolve().parts if PCI_ADDRESS.fullmatch(part)) if device.exists() else ()


def gpu(place: str, sys: Path = SYS) -> tuple[str, tuple[str, ...]]:
    """(place for net.transfer.common.topology, bridges) of 'cuda:N@PCI address', the location of a device in
    net/transfer/device/memory.py."""
    name, _, address = place.partition("@")
    return name, bridges(sys / "bus" / "pci" / "devices" / address.lower()) if address else ()


def of(region: Region) -> str | None:
    """'numa:N' of the first page of host memory; None if the kernel does not report it."""
    if region.place is not None:
        return region.place
    number = GET_MEMPOLICY.get(platform.machine())
    if number is None or region.closed:
        return None
    libc, node = ctypes.CDLL(None, use_errno=True), ctypes.c_int(-1)
    zero = ctypes.c_void_p(0)
    failed = libc.syscall(
        *(ctypes.c_long(number), ctypes.byref(node), zero, ctypes.c_ulong(0)),
        *(ctypes.c_void_p(region.address), ctypes.c_ulong(NODE_OF_ADDRESS)),
    )
    return None if failed or node.value < 0 else f"numa:{node.value}"


def far_rails(topology: Topology, region: Region, names: Sequence[str]) -> list[int]:
    """The distance (net.transfer.common.topology) of the region from each of the devices."""
    place = region.place
    if place is None and topology.one_place:
        return [NEAR] * len(names)
    if place is not None and place.startswith("cuda:"):
        return topology.distances(names, topology.near(*gpu(place)))
    return topology.distances(names, topology.near(of(region)))


def overrides(path: str | None) -> Overrides:
    """The topology file. Raises ValueError naming the flag."""
    if path is None:
        return Overrides()
    try:
        return parse(Path(path).read_text(), path.endswith(".json"))
    except OSError as error:
        raise ValueError(f"--topology-file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--topology-file {path}: {error}") from None
