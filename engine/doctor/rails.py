"""Which RDMA devices form rails, which CPUs and GPUs they are close to, and whether they reach GPU memory directly."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from engine.doctor.finding import FAIL, OK, WARN, Finding, System
from engine.doctor.rdma import DEVICES
from net.transfer.common.topology import Topology
from net.transfer.rdma import places


def rails(system: System, wanted: Sequence[str] = (), topology_file: str | None = None) -> list[Finding]:
    """Rail numbers, which peers must share, and the NUMA node of each rail. Reads --topology-file."""
    present = system.names(DEVICES)
    try:
        overrides = places.overrides(topology_file)
    except ValueError as error:
        return [Finding("rails", FAIL, str(error), "net/transfer/common/topology.py describes the file")]
    if missing := [name for name in wanted if name not in present]:
        return [Finding("rails", FAIL, f"no device {missing[0]!r} here", f"--rdma-devices: {', '.join(present)}")]
    names = list(wanted) or present
    if not names:
        return [Finding("rails", OK, "no RDMA device, so no rails")]
    topology = Topology(places.nics(names, system.root / "sys"), overrides)
    found = ", ".join(
        f"{number} = {name} ({_place(topology.numa_node(name))})" for name, number in topology.rail_numbers.items()
    )
    named = {*overrides.rails, *overrides.numa, *(name for near in overrides.near.values() for name in near)}
    if strange := sorted(named - set(names)):
        return [Finding("rails", WARN, f"{found}; {topology_file} names {', '.join(strange)}", "correct the file")]
    if len(names) > 1 and any(topology.numa_node(name) < 0 for name in names):
        remedy = "if this machine has more than one NUMA node, write the places of the cards to a --topology-file"
        return [Finding("rails", OK, found, remedy)]
    return [Finding("rails", OK, found)]


def _place(numa_node: int) -> str:
    return f"NUMA node {numa_node}" if numa_node >= 0 else "NUMA node unknown"


def gpudirect(system: System, load: Callable[[str], Any] = ctypes.CDLL) -> list[Finding]:
    """Whether cards can read GPU memory: this needs dma-bufs; otherwise KV passes through page-locked host memory."""
    if not system.names("proc/driver/nvidia/gpus"):
        return [Finding("GPUDirect", OK, "no GPU: there is nothing to reach")]
    if not system.names(DEVICES):
        return [Finding("GPUDirect", OK, "no RDMA device: GPU memory is staged through host memory")]
    try:
        load("libibverbs.so.1").ibv_reg_dmabuf_mr  # noqa: B018  raises if it is missing
    except (OSError, AttributeError):
        remedy = "rdma-core >= 34 (Debian 12: apt install libibverbs1)"
        return [Finding("GPUDirect", WARN, "libibverbs has no ibv_reg_dmabuf_mr: staged through host memory", remedy)]
    return [Finding("GPUDirect", OK, "libibverbs registers dma-bufs; KV is staged through host memory all the same")]
