"""Finds the node through which a program enters the pool: named by the program, running on this host, or started."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cache.store.remote import Remote
from net.channel.cluster_key import ClusterKey
from net.http.client import ClusterError, fetch_cluster

log = logging.getLogger("mooncake.connect")

ON_THIS_HOST = ("127.0.0.1:8000", "127.0.0.1:50051")
"""Where nodes are looked for if none is named: the default of --port, and upstream's port of a master."""

START_PORT = 50051
START_BYTES = 1 << 30
VALUE_BYTES = 4 << 20
START_S = 60.0
PROGRAM = """
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with the process that started it
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(slots=True)
class Entry:
    """The pool, and the node that this program has started for it, if any."""

    remote: Remote
    address: str
    started: subprocess.Popen[bytes] | None = None

    async def close(self) -> None:
        """Leave the pool; the started node ends."""
        await self.remote.close()
        if self.started is not None:
            self.started.terminate()
            await asyncio.to_thread(self.started.wait)


async def enter(named: str, segment_bytes: int) -> Entry:
    """`named`: HOST:PORT of nodes, separated by commas, or nothing. `segment_bytes`: DRAM of a node that must be
    started. Raises ClusterError, PeerRefused, PeerLost, KeyFileError."""
    addresses = [address.strip() for address in named.split(",") if address.strip()]
    if addresses:
        return await _first_of(addresses)
    for address in ON_THIS_HOST:
        if await _is_node(address):
            log.info("no node was named; the pool is entered through %s, which runs on this host", address)
            return await _open(address)
    return await _start(segment_bytes or START_BYTES)


async def _first_of(addresses: Sequence[str]) -> Entry:
    """The first that answers; the last one may take its time, because it may still start."""
    for address in addresses[:-1]:
        if await _is_node(address):
            log.info("the pool is entered through %s", address)
            return await _open(address)
        log.info("no node answers at %s", address)
    entry = await _open(addresses[-1])
    log.info("the pool is entered through %s", addresses[-1])
    return entry


async def _is_node(address: str) -> bool:
    try:
        await fetch_cluster(address, _api_key(), timeout_s=0.0, cluster_key=_cluster_key())
    except ClusterError as error:
        log.debug("%s", error)
        return False
    return True


async def _open(address: str) -> Entry:
    key_file = os.environ.get("MOONCAKE_CLUSTER_KEY_FILE")
    transports = ("tcp",) if os.environ.get("MC_FORCE_TCP") else ("shm", "tcp")
    remote = await Remote.open(address, api_key=_api_key(), cluster_key_file=key_file, transports=transports)
    return Entry(remote, address)


def _api_key() -> str | None:
    return os.environ.get("MOONCAKE_API_KEY")


def _cluster_key() -> ClusterKey | None:
    path = os.environ.get("MOONCAKE_CLUSTER_KEY_FILE")
    return None if path is None else ClusterKey(Path(path))


async def _start(segment_bytes: int) -> Entry:
    """Start a store node on this host. It ends with this process. If another process starts one at the same time, one
    of the two gets the port, and both use that node. Raises ClusterError."""
    address = f"127.0.0.1:{START_PORT}"
    node = await asyncio.to_thread(_spawn, segment_bytes)
    deadline = asyncio.get_running_loop().time() + START_S
    while not await _is_node(address):
        if node.poll() is not None or asyncio.get_running_loop().time() > deadline:
            node.kill()
            raise ClusterError(f"no node was named, none runs on this host, and one started at {address} has ended")
        await asyncio.sleep(0.1)
    if node.poll() is not None:  # the node of another process has the port
        return await _open(address)
    log.warning(
        "no node was named and none runs on this host: started one at %s, which ends with this process", address
    )
    entry = await _open(address)
    entry.started = node
    return entry


def _spawn(segment_bytes: int) -> subprocess.Popen[bytes]:
    program = Path(__file__).resolve().parents[2] / "mooncake.py"
    flags = ["--role", "store", "--model", "none", "--port", str(START_PORT), "--log-level", "warning"]
    flags += ["--dram-bytes", str(segment_bytes), "--value-bytes", str(VALUE_BYTES)]
    command = [sys.executable, "-P", "-c", PROGRAM, str(program), *flags]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/")
