"""One process of a contender: receives commands on a socket, moves blocks between the two arenas, and measures itself.

Runs under the contender's own interpreter, so it needs only the standard library (and the contender's own packages).
It ends with the process that started it, also while it is stopped:

    python -m lab.bench.transfer.agent NAME owner|client --control FD --local FD --remote FD --nbytes N
        --congestion NAME

The owner holds the remote arena. It answers {"ready": info}; the client gets {"owner": info}, answers {"ready": {}},
and then measures one cell per order. {"cpu": true} requests the CPU seconds of each thread so far.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import signal
import socket
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Protocol

from lab.bench.common.rank import quantile

MODULES = {
    "memcpy": "raw",
    "memcpy-2": "raw",
    "sockets": "raw",
    "stream": "raw",
    "ours-shm": "ours",
    "ours-tcp": "ours",
    "ours-tcp-sleep": "ours",
    "ours-tcp-key": "ours",
    "mooncake-te": "mooncake_te",
    "nixl": "nixl",
}
"""Where each contender is implemented."""

STORES = {
    "store-shm": "ours_store",
    "store-tcp": "ours_store",
    "store-shm-plain": "ours_store",
    "store-tcp-plain": "ours_store",
    "mooncake-store": "mooncake_store",
}
"""The same for the contenders of scripts/bench.py store."""

Call = tuple[list[int], list[int]]
"""Offsets of the blocks of one call: in the local and in the remote arena."""


class Arena:
    """A memfd that this process maps."""

    def __init__(self, memfd: int, nbytes: int) -> None:
        self.memfd, self.nbytes = memfd, nbytes
        self.mapping = mmap.mmap(memfd, nbytes)
        self.memory = memoryview(self.mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))


class Owner(Protocol):
    """Serves the remote arena."""

    def start(self, remote: Arena) -> dict[str, Any]:
        """Start serving; returns the information that a client needs."""


class Client(Protocol):
    """Reads and writes the remote arena."""

    def connect(self, info: dict[str, Any], local: Arena) -> None: ...

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        """The arguments of every call, in the contender's own form; not timed."""

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        """Makes calls, cycling through `prepared` from its first; returns the seconds of each."""


CALLS_MAX = 1 << 15
"""Maximum of distinct calls of a cell: 128 MiB of 4 KiB blocks are cold enough, and more would take long to prepare."""

PR_SET_PDEATHSIG = 1


@cache
def plan(size: int, batch: int, nbytes: int) -> list[Call]:
    """Calls that visit every block at most once, in an order without adjacent neighbours, so that no contender can
    merge them into one copy. The same for every contender."""
    slots = nbytes // size
    here, there = list(range(slots)), list(range(slots))
    Random(size).shuffle(here)
    Random(size + 1).shuffle(there)
    return [
        ([i * size for i in here[at : at + batch]], [i * size for i in there[at : at + batch]])
        for at in range(0, slots - batch + 1, batch)[:CALLS_MAX]
    ]


def most_puts(call_bytes: int, arena_bytes: int) -> int:
    """Maximum calls of one cell that put new keys: with those before and after them they fit into an arena, so no store
    evicts."""
    return max(1, arena_bytes // call_bytes - 3)


def timed(move: Callable[[Any], None], prepared: Sequence[Any], seconds: float, most: int = 1 << 62) -> list[float]:
    """`Client.measure` of a blocking call, for `seconds` and at most `most` calls."""
    clock = time.perf_counter
    took: list[float] = []
    end = clock() + seconds
    index = 0
    while True:
        begin = clock()
        move(prepared[index])
        now = clock()
        took.append(now - begin)
        if now >= end or len(took) >= most:
            return took
        index = (index + 1) % len(prepared)


def cell(client: Client, order: dict[str, Any], nbytes: int) -> dict[str, Any]:
    """Measure one cell: op, size (bytes of a block), batch (blocks per call), seconds."""
    size, batch = order["size"], order["batch"]
    calls = plan(size, batch, nbytes)
    prepared = client.prepare(size, calls)
    calls = calls[: len(prepared)]
    client.measure(order["op"], prepared, 0.0)  # a store first stores the blocks that will be read
    before, begun = threads_s(), time.perf_counter()
    took = client.measure(order["op"], prepared, order["seconds"])
    wall_s = time.perf_counter() - begun
    return {
        "n": len(took),
        "gbs": len(took) * size * batch / sum(took) / 1e9,
        "p50_us": 1e6 * quantile(took, 0.5),
        "p99_us": 1e6 * quantile(took, 0.99),
        "threads_s": grown(before, threads_s()),
        "wall_s": wall_s,
        "first": calls[0],
        "last": calls[(len(took) - 1) % len(calls)],
    }


def end_with_parent() -> None:
    """A stopped process reads no end of its socket: the kernel kills it when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def threads_s() -> dict[str, float]:
    """CPU seconds of each live thread of this process, by its id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended meanwhile
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> list[float]:
    """CPU seconds that each thread used between two readings."""
    return [seconds - before.get(name, 0.0) for name, seconds in after.items()]


def serve(agent: Any, role: str, orders: Any, local: Arena, remote: Arena) -> None:
    """Answer orders until the socket closes."""
    if role == "owner":
        _say(orders, {"ready": agent.start(remote)})
    for line in orders:
        order = json.loads(line)
        if "owner" in order:
            agent.connect(order["owner"], local)
            _say(orders, {"ready": {}})
        elif "cpu" in order:
            _say(orders, {"cpu": threads_s()})
        elif "stall" in order:
            _say(orders, agent.stall(order))
        else:
            _say(orders, cell(agent, order, local.nbytes))


def _say(orders: Any, answer: dict[str, Any]) -> None:
    orders.write(json.dumps(answer) + "\n")
    orders.flush()


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("name", choices=[*MODULES, *STORES])
    parser.add_argument("role", choices=("owner", "client"))
    for descriptor in ("control", "local", "remote"):
        parser.add_argument(f"--{descriptor}", type=int, required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--congestion", required=True)
    args = parser.parse_args()
    orders = socket.socket(fileno=args.control).makefile("rw")
    end_with_parent()
    try:
        agent = import_module(f"lab.bench.transfer.{(MODULES | STORES)[args.name]}").make(
            args.name, args.role, args.congestion
        )
        local, remote = Arena(args.local, args.nbytes), Arena(args.remote, args.nbytes)
        if args.name in ("memcpy", "memcpy-2", *STORES) and args.role == "client":
            agent.remote = remote
        serve(agent, args.role, orders, local, remote)
    except Exception as error:
        traceback.print_exc()
        _say(orders, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
