"""Silent connections and a full or frozen SSD tier under load: no client error, the same tokens, nothing held.

    python scripts/faults.py exhaustion                  one node of each role, embedded model, about 2 minutes
    python scripts/faults.py exhaustion --cases http,freeze --connections 4200 --json out.json

Clients at the store node send one request after the other. Half of the prompts are in the pool, most of them on its SSD
tier only, and half of them are new. In every case the fault begins when all clients have a token, lasts --fault-s and
at least until every client has begun one more request, and ends:

    control  --connections silent connections to the control ports of all nodes
    http     --connections to the HTTP port of the clients' node, each with half of the head of a request
    full     the disk under the store node's SSD tier rejects writes
    freeze   no read or write of that disk returns

Connections that a node closes are opened again. Every request must return exactly the tokens of an undisturbed run;
every node must answer /health during a flood, and the store node must report the trouble of its disk, and later its
end. Afterwards no block is held and memory is flat. Exit code 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from lab.bench.common.results import Row
from lab.faults.client import Body, Load
from lab.faults.faulty_disk import FaultyDisk
from lab.faults.networks.silent_connections import Address, SilentConnections
from lab.faults.runner import EMBEDDED, TINY, Run, Scenario, add_model_flag, run
from lab.flag_types import above_zero, names_of, positive
from lab.launch import rest
from lab.launch.cluster import DEFAULT_NODES, LocalCluster

DOOR = "store-0"
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
FLOODS = ("control", "http")
DISK = {"full": ("write ENOSPC", "failing"), "freeze": ("freeze", "stalled")}
"""Case -> (what the disk does wrong, the trouble that the store node must report)."""

NOTICE_S = 60.0
BODIES = 3
"""Prompts per client: together they do not fit into the prefill node's arena."""

SIZES = {TINY: ("4M", "2M", "64M"), EMBEDDED: ("320M", "64M", "2G")}
"""Model -> (KV arena of the prefill node, DRAM of the store node, its SSD tier)."""


def add_flags(parser: ArgumentParser) -> None:
    add_model_flag(parser, EMBEDDED)
    parser.add_argument(
        "--cases", type=names_of(*FLOODS, *DISK), default=",".join((*FLOODS, *DISK)), help="joined by commas, in order"
    )
    parser.add_argument("--connections", type=positive, default=4200, help="silent connections of a flood")
    parser.add_argument("--fault-s", type=above_zero, default=8.0, help="least length of a fault, seconds")
    parser.add_argument("--clients", type=positive, default=8)
    parser.add_argument("--prompt-tokens", type=positive, default=600)
    parser.add_argument("--tokens", type=positive, default=24, help="output tokens of each request")


def play(this: Run) -> None:
    args = this.args
    this.facts = {"nodes": DEFAULT_NODES}
    disk = FaultyDisk(this.folder())
    arena, dram, ssd = SIZES.get(args.model, SIZES[EMBEDDED])
    role_flags = {
        "prefill": ["--kv-cache-bytes", arena],
        "store": ["--dram-bytes", dram, "--ssd-bytes", ssd, "--ssd-path", str(disk.path)],
    }
    with this.cluster(DEFAULT_NODES, this.model_flags(), role_flags=role_flags, env=disk.env) as cluster:
        bodies = this.bodies(cluster, BODIES * args.clients, args.prompt_tokens, args.tokens, args.seed)
        calm = this.calm(cluster, DOOR, bodies, args.clients)
        for case in args.cases.split(","):
            fault = disk_fault(cluster, disk, case) if case in DISK else flood(cluster, case, args.connections)
            load, found = asyncio.run(_under(cluster, half_new(bodies, case), args.clients, case, fault, args.fault_s))
            this.judge(case, cluster, calm, load)
            this.rows.append(Row(case, found.metric, "", float(found.count)))
            this.wrong += [f"{case}: {text}" for text in found.wrong]


def half_new(bodies: Sequence[Body], case: str) -> list[Body]:
    """Every second body with a salt, so that nobody has its prompt yet."""
    return [body | {"cache_salt": case} if number % 2 else body for number, body in enumerate(bodies)]


@dataclass
class Found:
    """What the fault did besides its effect on the requests."""

    metric: str
    count: int
    wrong: list[str]


@asynccontextmanager
async def flood(cluster: LocalCluster, case: str, count: int) -> AsyncIterator[Found]:
    """Silent connections until the end of the block; then all must have been opened, and every node must answer /health
    before they close."""
    found = Found("silent connections", 0, [])
    nodes = cluster.nodes if case == "control" else [cluster[DOOR]]
    addresses = [node.control if case == "control" else http_address(node.url) for node in nodes]
    greeting = b"" if case == "control" else HALF_A_HEAD
    async with SilentConnections([one for one in addresses if one is not None], count, greeting) as silent:
        yield found
        if not await asyncio.to_thread(until, lambda: silent.opened >= count):
            found.wrong.append(f"only {silent.opened} of {count} silent connections could be opened: that is no flood")
        for node in cluster.nodes:
            try:
                await asyncio.to_thread(rest.get, f"{node.url}/health")
            except rest.RestError as error:
                found.wrong.append(str(error))
        found.count = silent.opened


def http_address(url: str) -> Address:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


@asynccontextmanager
async def disk_fault(cluster: LocalCluster, disk: FaultyDisk, case: str) -> AsyncIterator[Found]:
    """A disk that is wrong until the end of the block, which waits until the store node has reported that."""
    what, trouble = DISK[case]
    found = Found("disk troubles reported", 0, [])
    disk.is_wrong(what)
    try:
        yield found
        found.count = await asyncio.to_thread(until, lambda: troubled(cluster, trouble))
    finally:
        disk.is_wrong("")
    if not found.count:
        found.wrong.append(f"the store node never reported that its disk is {trouble}")
    if not await asyncio.to_thread(until, lambda: not troubled(cluster, trouble)):
        found.wrong.append(f"the store node still reports that its disk is {trouble}")


def troubled(cluster: LocalCluster, trouble: str) -> bool:
    """Whether the store node's metrics report this trouble of its disk."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(f"{cluster[DOOR].url}/metrics", timeout=30).read().decode()
    rows = [line for line in text.splitlines() if "store_disk_trouble{" in line and f'trouble="{trouble}"' in line]
    return any(float(row.split()[-1]) for row in rows)


def until(condition: Callable[[], bool]) -> bool:
    """Whether the condition holds within NOTICE_S."""
    deadline = time.monotonic() + NOTICE_S
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


async def _under(
    cluster: LocalCluster,
    bodies: Sequence[Body],
    clients: int,
    name: str,
    fault: AbstractAsyncContextManager[Found],
    seconds: float,
) -> tuple[Load, Found]:
    """The load, with the fault in its middle."""
    async with Load([cluster[DOOR].url], bodies, name, clients=clients) as load:
        await load.until(lambda: load.with_tokens(1) >= clients)
        async with fault as found:
            sent = len(load.requests)
            await asyncio.sleep(seconds)
            await load.until(lambda: len(load.requests) >= sent + clients)
    return load, found


main = partial(
    run,
    Scenario(
        __doc__,
        add_flags,
        play,
        quick={"model": TINY, "connections": 600, "fault_s": 3.0, "clients": 4},
    ),
)
