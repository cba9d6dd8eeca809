"""Many nodes for a long time, of which some end and others begin, under an open load: nothing is lost, nothing grows.

    scripts/faults.py churn                         40 nodes of a tiny model for 30 minutes; needs 14 GiB and two cores
    scripts/faults.py churn --seconds 300 --seed 7  the same for 5 minutes, with other nodes and another order
    scripts/faults.py churn --nodes prefill=2,decode=3,store=3 --seconds 60 --sample-s 1 --json out.json
    scripts/faults.py churn --quick                 8 nodes for 25 s

Requests arrive at random times at any node, at --rate per second. In each turn one to --at-once nodes end: by SIGKILL,
by SIGTERM, or by POST /drain. After up to 5 s others begin in their place, half of them with new names. A turn ends
when all living nodes count each other as members. The share --survivors of the nodes of each role never ends. The seed
decides who survives, who ends, how, and the load; times differ from run to run.

What is checked; exit code 1 if one of these fails:
  - every request returns the tokens that it gave on the calm cluster, however often its clients had to reconnect or
    were refused; nodes that were drained or terminated end with code 0, and remove their directories before newcomers
    could do it
  - survivors stay flat over the second half of the run, in private memory, open files and threads: the growth is what
    their robust slope (Theil-Sen) makes of that time, or a step in it. Memory may grow by --most-mib; files and threads
    by one per ten nodes that ended in that half, and at least by --most-files: one per peer that was lost in one of
    the three ways is a leak.
    Connections and shared segments are not files here: nodes connect when they first meet, and that takes long.
    A survivor with too few samples to judge fails: short runs need a smaller --sample-s
  - at the end no living node maps a shared segment or has a descriptor of one whose owner is dead, no connection to a
    dead node is open, and no directory of a dead node remains
  - at the end no node holds a block, and all books are balanced

Runs of under ten minutes need a larger --most-mib, because caches still fill.
Flags that the scenario does not know go to every node.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from lab.bench.common.results import Row
from lab.faults.checks import form
from lab.faults.client import Body
from lab.faults.rolling_restart import drain
from lab.faults.runner import Run, Scenario, run
from lab.faults.soak.flatness import Point, growth
from lab.faults.soak.open_load import OpenLoad
from lab.faults.soak.processes import (
    Holding,
    connected,
    directories,
    half_closed,
    holding,
    kinds,
    links,
    of_the_dead,
    segments,
    unix_peers,
)
from lab.faults.soak.turns import DRAIN, KILL, Turn, kind_of, survivors, turns
from lab.faults.tiny import tiny_model
from lab.flag_types import above_zero, natural, not_negative, positive, some_of_all
from lab.launch import rest
from lab.launch.cluster import LocalCluster, NodeDied, StartTimeout
from net.transfer.common.private_directory import sweep

CASE = "churn"
FLAGS = (
    "--max-model-len", "1024", "--kv-cache-bytes", "8M", "--max-num-seqs", "16", "--num-threads", "1",
    "--calibration-ms", "0", "--drain-timeout-ms", "60000",
)  # fmt: skip
"""Small arenas, 10,000 tokens, that are soon full: a cache that is not yet full looks like a leak."""

SHARE = {"store": ("--dram-bytes", "8M")}
BODIES, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 120, 40
AT_ONCE_CALM = 8
START_S = 600.0
"""40 nodes that import torch at the same time need 3 to 4 s of a core each."""

FORM_S = 120.0
END_S = 90.0
"""Until a node that leaves has ended: its --drain-timeout-ms, and its end."""

ENDS_PER_LEAK = 10
"""Files and threads may grow by one per this number of ended nodes. The rarest way to end is that of one in five nodes,
and something may leak in that way only."""

PROGRESS_S = 10.0
MIB = 1 << 20
QUICK = {"nodes": "prefill=2,decode=3,store=3", "seconds": 25.0, "sample_s": 1.0, "at_once": 2}


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", default="prefill=10,decode=20,store=10", help="nodes in the format of scripts/up")
    parser.add_argument("--seconds", type=above_zero, default=1800.0, help="how long nodes end and begin")
    parser.add_argument("--rate", type=above_zero, default=2.0, help="requests per second, at all nodes together")
    parser.add_argument("--survivors", type=some_of_all, default=0.4, help="share of nodes of each role that never end")
    parser.add_argument("--at-once", type=positive, default=3, help="most nodes that end in one turn")
    parser.add_argument("--pause-s", type=not_negative, default=2.0, help="between two turns, seconds")
    parser.add_argument("--sample-s", type=above_zero, default=5.0, help="between two samples of the survivors")
    parser.add_argument("--most-mib", type=above_zero, default=8.0, help="limit of a survivor's growth in memory")
    parser.add_argument("--most-files", type=natural, default=4, help="least limit of it in open files and in threads")


def play(this: Run) -> None:
    args = this.args
    this.facts = {"model": "tiny", "flags": this.node_flags}
    own = this.folder()  # nodes make their directories in it, so those of others do not count
    flags = [*tiny_model(this.folder()), *FLAGS, *this.node_flags]
    with this.cluster(
        args.nodes, flags, role_flags=SHARE, env={"TMPDIR": str(own)}, start_timeout_s=START_S
    ) as cluster:
        kept = survivors(cluster.plan, args.survivors, args.seed)
        bodies = this.bodies(cluster, BODIES, PROMPT_TOKENS, OUTPUT_TOKENS, args.seed)
        calm = this.calm(cluster, min(kept), bodies, AT_ONCE_CALM)
        soak = Soak(cluster, kept, turns(cluster.plan, kept, args.at_once, args.seed), this.wrong)
        load = asyncio.run(soak.run(bodies, args.seconds, args.rate, args.pause_s, args.sample_s, args.seed))
        this.compare(CASE, cluster, calm, load)
        rows, wrong = soak.judged(args.most_mib, args.most_files)
        this.rows += [Row(CASE, "sent again after a refusal", "", float(load.refused)), *soak.counted(), *rows]
        this.wrong += wrong
        for name, found in left_behind(cluster, own).items():
            this.rows.append(Row(CASE, name, "", float(len(found)), limits={"goal": 0.0}))
            this.wrong += [f"{CASE}: {name}: {what}" for what in found]


def left_behind(cluster: LocalCluster, own: Path) -> Mapping[str, Sequence[str]]:
    """What remains of nodes that have ended -> where. `own`: the folder with the nodes' directories."""
    living = [node.pid for node in cluster.living]
    return {
        "segments of dead nodes": [
            f"{path} in {node.name}" for node in cluster.living for path in of_the_dead(segments(node.pid), living)
        ],
        "connections to dead nodes": [
            *(f"{count} over TCP in {node.name}" for node in cluster.living if (count := half_closed(node.pid))),
            *(
                f"to process {peer} in {node.name}"
                for node in cluster.living
                for peer in unix_peers(node.pid)
                if peer not in living
            ),
        ],
        "directories of dead nodes": [str(own)] * sweep(own),
    }


def remaining(paths: Iterable[str]) -> list[str]:
    """Those of the paths that exist."""
    return [path for path in paths if Path(path).exists()]


class Soak:
    """One run: turns and load, with samples of the survivors."""

    def __init__(self, cluster: LocalCluster, kept: set[str], drawn: Iterator[Turn], wrong: list[str]) -> None:
        """`wrong` gets a line for every node that did not end, begin or agree as it should."""
        self._cluster, self._kept, self._drawn, self._wrong = cluster, sorted(kept), drawn, wrong
        self.ended: Counter[str] = Counter()  # how -> nodes
        self.agreed_s: list[float] = []  # of every turn, from the first new node's start until all agree
        self.samples: dict[str, list[tuple[float, Holding]]] = {name: [] for name in self._kept}
        self.ends_at: list[float] = []  # monotonic
        self.begun = self.over = 0.0

    async def run(
        self, bodies: Sequence[Body], seconds: float, rate: float, pause_s: float, sample_s: float, seed: int
    ) -> OpenLoad:
        """Take turns for `seconds`, under load."""
        self.begun = time.monotonic()
        async with OpenLoad(self._doors, bodies, rate, random.Random(seed)) as load:
            watching = asyncio.create_task(self._watch(load, sample_s))
            try:
                for number, turn in enumerate(self._drawn):
                    if time.monotonic() - self.begun > seconds:
                        break
                    if not await self._take(number, turn):
                        break
                    await asyncio.sleep(pause_s)
                else:  # all nodes survive
                    await asyncio.sleep(seconds)
            finally:
                self.over = time.monotonic()
                watching.cancel()
                (failed,) = await asyncio.gather(watching, return_exceptions=True)
                if not isinstance(failed, asyncio.CancelledError):
                    self._wrong.append(f"the samples ended early: {failed!r}")
        return load

    def _doors(self) -> list[str]:
        """Nodes that take requests. A balancer learns of a node's end from its health checks, or from /drain."""
        return [node.url for node in self._cluster.living if node.url and not node.expected_dead]

    # --- turns

    async def _take(self, number: int, turn: Turn) -> bool:
        """Whether the cluster is whole again."""
        try:
            await asyncio.gather(*(self._end(one.ends, one.how) for one in turn.changes))
            await asyncio.sleep(turn.away_s)
            since = time.monotonic()
            for one in turn.changes:
                await asyncio.to_thread(self._begin, one.ends, one.begins)
            await asyncio.to_thread(form, self._cluster, FORM_S)
            self.agreed_s.append(time.monotonic() - since)
        except (NodeDied, StartTimeout, TimeoutError) as error:
            self._wrong.append(f"turn {number}, {turn}: {error}")
            return False
        return True

    async def _end(self, name: str, how: str) -> None:
        node = self._cluster[name]
        node.expected_dead = True
        own = directories(node.pid)
        try:
            if how == DRAIN:
                await drain(node.url)
            else:
                node.process.send_signal(signal.Signals[how])
            code = await asyncio.to_thread(node.process.wait, END_S)
        except (subprocess.TimeoutExpired, rest.RestError) as error:
            self._wrong.append(f"{name} did not end after {how}: {error}; {node.last_lines(5)}")
            await asyncio.to_thread(node.destroy)  # the checks at the end ask every living node
            return
        self.ended[how] += 1
        self.ends_at.append(time.monotonic())
        if code != (-signal.SIGKILL if how == KILL else 0):
            self._wrong.append(f"{name} ended with exit code {code} after {how}: {node.last_lines(5)}")
        if how != KILL:
            self._wrong += [f"{name} left {path} after {how}" for path in remaining(own)]

    def _begin(self, ends: str, begins: str) -> None:
        if ends == begins:
            self._cluster.restart(begins)
        else:
            self._cluster.add(self._cluster[ends].role, name=begins)

    # --- samples

    async def _watch(self, load: OpenLoad, sample_s: float) -> None:
        due, told = time.monotonic(), 0.0
        while True:
            await asyncio.to_thread(self._sample)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                print(self._progress(load), file=sys.stderr, flush=True)
            due = max(time.monotonic(), due + sample_s)
            await asyncio.sleep(due - time.monotonic())

    def _sample(self) -> None:
        connections = connected()
        for name in self._kept:
            found = holding(self._cluster[name].pid, connections)
            if found is not None:
                self.samples[name].append((time.monotonic(), found))

    def _progress(self, load: OpenLoad) -> str:
        newest = [found[-1][1] for found in self.samples.values() if found]
        failed, ended = sum(bool(one.error) for one in load.streams), sum(self.ended.values())
        return (
            f"{time.monotonic() - self.begun:5.0f} s: {len(self.agreed_s)} turns, {ended} nodes ended, "
            f"{len(self._cluster.living)} live; {len(load.requests)} requests, {load.open} open, {failed} failed; "
            f"a survivor has up to {max(one.private_bytes for one in newest) / MIB:.0f} MiB, "
            f"{max(one.files for one in newest)} files, {max(one.threads for one in newest)} threads, "
            f"{max(one.segments for one in newest)} segments"
        )

    # --- results

    def counted(self) -> list[Row]:
        slowest = max(self.agreed_s, default=None)
        return [
            Row(CASE, "turns", "", float(len(self.agreed_s))),
            *(Row(CASE, f"ended by {how}", "", float(count)) for how, count in sorted(self.ended.items())),
            Row(CASE, "longest time from a start to agreement", "s", slowest),
        ]

    def judged(self, most_mib: float, most_files: int) -> tuple[list[Row], list[str]]:
        """(a row for every quantity and kind of survivors with the largest growth, what grew too much)"""
        middle = (self.begun + self.over) / 2
        ended = sum(at >= middle for at in self.ends_at)
        most = float(max(most_files, ended // ENDS_PER_LEAK))
        rows: list[Row] = []
        unjudged = (name for name, size in self._grown(lambda one: one.files).items() if size is None)
        wrong = [f"{name}: too few samples to judge its growth: {len(self.samples[name])}" for name in unjudged]
        limits: tuple[tuple[str, str, float | None, Callable[[Holding], float]], ...] = (
            ("private memory", "MiB", most_mib, lambda one: one.private_bytes / MIB),
            ("open files", "", most, lambda one: one.unconnected),
            ("threads", "", most, lambda one: one.threads),
            ("connections and segments", "", None, lambda one: one.files - one.unconnected),  # with new peers: no limit
        )
        for what, unit, limit, value in limits:
            grown = self._grown(value)
            for kind in dict.fromkeys(map(kind_of, grown)):
                sizes = [size for name, size in grown.items() if kind_of(name) == kind and size is not None]
                bound = {} if limit is None else {"most": limit}
                rows.append(Row(f"{kind} nodes", f"growth of {what}", unit, max(sizes, default=None), limits=bound))
            if limit is None:
                continue
            wrong += [
                f"{name}: {what} grew by {size:.1f} {unit}".rstrip() + self._last(name)
                for name, size in grown.items()
                if size is not None and size > limit
            ]
        return rows, wrong

    def _grown(self, value: Callable[[Holding], float]) -> dict[str, float | None]:
        found = {}
        for name, samples in self.samples.items():
            points: list[Point] = [(at, float(value(one))) for at, one in samples]
            found[name] = growth(points, self.begun, self.over) if points else None
        return found

    def _last(self, name: str) -> str:
        first, last = self.samples[name][0][1], self.samples[name][-1][1]
        return f"; {first} -> {last}; descriptors {dict(kinds(links(self._cluster[name].pid)))}"


main = partial(run, Scenario(__doc__, add_flags, play, quick=QUICK, passes_flags=True))
