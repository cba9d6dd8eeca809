"""Mixed load on three store nodes: values, objects, removals, and a client that reconnects. It observes from outside
what must not grow: resident memory and file descriptors of the nodes, held slots, leases, LMDB's readers."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb

from cache.store.client import NoRoom, Store, Unreachable
from lab.faults.checks import Memory, growth_row
from lab.faults.runner import Run
from lab.launch.cluster import LocalCluster

VALUE = 64 << 10
FLAGS = ("--model", "none", "--value-bytes", str(VALUE), "--dram-bytes", "24M", "--ssd-bytes", "96M", "--replicas", "2")
KEYS = 3000  # more than twice what DRAM and SSD of the three nodes hold
ARENA_BLOCKS = 32
WARM_UP = 0.3  # share of the time after which growth counts
GROWTH_BYTES = 24 << 20  # maximum growth of a node's memory after that: allocator noise is smaller
OBJECT_BYTES = 1_000_000


def content(i: int) -> bytes:
    return random.Random(i).randbytes(1 + (i * 7919) % VALUE)


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


class Load:
    """One client's calls; counts wrong results."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.address, self.rng = address, rng
        self.store = Store(address)
        self.arena = self.store.arena("soak", ARENA_BLOCKS * VALUE)
        self.counts = dict.fromkeys(("calls", "hits", "misses", "no_room", "unreachable", "wrong", "clients"), 0)

    def step(self) -> None:
        """Make one random call."""
        rng, store = self.rng, self.store
        i = min(int(rng.paretovariate(0.6)), KEYS)
        kind = rng.random()
        self.counts["calls"] += 1
        try:
            if kind < 0.45:
                self._check(store.get(key_of(i)), content(i))
            elif kind < 0.75:
                store.put_many([(key_of(j), content(j)) for j in range(i, i + rng.randint(1, 8))])
            elif kind < 0.85:
                numbers = [rng.randrange(KEYS) for _ in range(ARENA_BLOCKS)]
                for j, value in zip(numbers, store.get_many([key_of(j) for j in numbers]), strict=True):
                    self._check(value, content(j))
            elif kind < 0.90:
                store.remove(key_of(i))
            elif kind < 0.98:
                name = f"objects/{i % 5}"
                data = random.Random(i).randbytes(OBJECT_BYTES)
                store.put(name, data, replace=True)
                self._check(store.get(name), data)
            else:
                store.close()
                self.counts["clients"] += 1
                self.store = store = Store(self.address)
                self.arena = store.arena("soak", ARENA_BLOCKS * VALUE)
        except NoRoom:
            self.counts["no_room"] += 1
        except Unreachable:  # happens if the machine gives the nodes too little CPU
            self.counts["unreachable"] += 1

    def _check(self, got: Any, wanted: bytes) -> None:
        if got is None:
            self.counts["misses"] += 1
        else:
            self.counts["hits"] += 1
            self.counts["wrong"] += got != wanted


def descriptors(cluster: LocalCluster) -> dict[str, int]:
    """Name of each node -> its open files."""
    return {node.name: len(list(Path(f"/proc/{node.pid}/fd").iterdir())) for node in cluster.nodes}


def readers(directory: Path) -> int:
    """Entries of LMDB's reader table, of all processes; read in a separate process."""
    code = f"import lmdb; print(lmdb.open({str(directory)!r}, readonly=True, max_dbs=3).readers())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sum(line.split()[0].isdigit() for line in done.stdout.splitlines() if line.split())


def nothing_read(counts: Mapping[str, int]) -> list[str]:
    """What is wrong if no call has read a value: then no byte was compared, whatever the calls raised."""
    return [] if counts["hits"] else [f"the mixed load read nothing back: {dict(counts)}"]


def soak(this: Run, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    """Counts of the load and of growth: `leaks` is the number of kinds of resources that grew."""
    rng = random.Random(seed)
    home = this.folder()
    with this.cluster("store=3", (*FLAGS, "--ssd-path", f"{home}/{{node}}")) as nodes:
        load = Load(nodes.nodes[0].url.removeprefix("http://"), rng)
        begin = time.monotonic()
        memory, files = Memory(), dict[str, int]()
        while (passed := time.monotonic() - begin) < seconds:
            load.step()
            if passed > WARM_UP * seconds and not files:
                memory.growth(nodes)
                files = descriptors(nodes)
            time.sleep(max(0.0, load.counts["calls"] / rate - passed))
        load.store.close()
        time.sleep(2.0)
        row, grown = growth_row("soak", memory.growth(nodes), GROWTH_BYTES)
        opened = [count - files[name] for name, count in descriptors(nodes).items()]
        with Store(load.address) as store:
            homes = store.stats()["homes"]
        held = sum(one["tiers"]["dram"]["held"] + one["share"]["leases"] for one in homes.values())
        tables = [readers(home / node.name) for node in nodes.nodes]
    this.rows.append(row)
    problems = {"memory": bool(grown), "fds": max(opened) > 0, "slots": held > 0, "readers": max(tables) > 8}
    leaks = [name for name, found in problems.items() if found]
    this.wrong += nothing_read(load.counts)
    facts = {"fd_growth": opened, "held": held, "lmdb_readers": tables}
    print(f"leaks: {leaks or 'none'}", flush=True)
    return load.counts | facts | {"leaks": len(leaks), "seconds": seconds, "lmdb": lmdb.version()}
