"""Gossip at scale: the real cores on a virtual network. Traffic, CPU, age of information, detection, false deaths.

    python scripts/bench.py gossip --json lab/results/DATE-gossip.json
    python scripts/bench.py gossip --only state --nodes 1024

Every node reports a new load in every state period, which is the maximum; 1 % of the packets are lost. Bytes are those
of UDP payloads without sealing, plus 28 for IP and UDP headers. CPU is that of the whole process including the
simulator, so it is an upper bound for the gossip cores. Above 256 nodes both layouts run: one cell, and cells of at
most 256, where records stay in the cell and summaries describe other cells. Detection and false deaths run the
membership core alone.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

from lab.bench.common.results import Row, add_result_flags, report
from lab.flag_types import above_zero, natural, positive
from lab.virtual.cluster import GossipNode, VirtualCluster
from lab.virtual.network import VirtualNetwork, VirtualNode, Weather
from sched.gossip.state import NodeRecord
from sched.membership.events import Learn, MemberDown
from sched.membership.member import Member, Status, presets
from sched.membership.swim import Membership

HEADERS = 28
LOSS = 0.01
BLOCKS = 400  # in each cache of the runs with stores
PAUSE_S = 2.0
PAUSES_PER_HOUR = 12
AGE_LIMIT_S = {256: 0.4, 1024: 1.0}
TRAFFIC_LIMIT = {256: 0.35, 1024: 0.7}


class BusyCluster(VirtualCluster):
    """Nodes whose load changes at every read; `written_ms` is true time, so ages are exact."""

    stored: dict[str, deque[int]]  # keys in each cache, oldest first

    stores_per_s = 0  # and as many evictions

    def load_of(self, node: GossipNode) -> NodeRecord:
        own = node.core.digests.own
        for _ in range(round(self.stores_per_s * self.preset.state_period_s)):
            fresh = self.stored.setdefault(node.name, deque())
            fresh.append(self.rng.getrandbits(64))
            own.add(fresh[-1])
            if len(fresh) > BLOCKS:
                own.discard(fresh.popleft())
        return NodeRecord(
            blocks_total=1000, work_s=10 * self.rng.random(), running=8, written_ms=round(self.now * 1000)
        )


def state_rows(
    size: int, warm_s: float, measure_s: float, seed: int, cell_nodes: int = 256, stores_per_s: int = 0
) -> list[Row]:
    """Traffic, CPU and age of information of `size` busy nodes in cells of at most `cell_nodes`; with `stores_per_s`,
    each node also stores and evicts that many blocks per second, which the digests report."""
    weather = Weather(loss=LOSS, delay_s=(0.0001, 0.0005))
    preset = replace(presets["lan"], cell_nodes=cell_nodes)
    cluster = BusyCluster(random.Random(seed), random.Random, preset, weather, HEADERS)
    nodes = [cluster.add(f"node-{i}", root="aa" * 16) for i in range(size)]
    cluster.stored, cluster.stores_per_s = {}, stores_per_s
    cluster.acquaint()
    cluster.run(warm_s)
    sent = [(node.packets_sent, node.bytes_sent) for node in nodes]
    ages: list[np.ndarray] = []
    watched = cluster.rng.sample(nodes, min(size, 32))

    def look() -> None:
        ages.extend(true_ages(cluster, node) for node in watched)

    for moment in np.arange(0.05, measure_s, 0.1):
        cluster.at(cluster.now + float(moment), look)
    started = time.process_time()
    cluster.run(measure_s)
    cpu_s = time.process_time() - started
    packets, nbytes = np.array([(n.packets_sent, n.bytes_sent) for n in nodes]).T - np.array(sent).T
    age = np.concatenate(ages)
    case = f"state, {size} nodes" + (f", cells of at most {cell_nodes}" if size > cell_nodes else "")
    case += f", {stores_per_s} stores/s each" if stores_per_s else ""
    limit = {"limit": TRAFFIC_LIMIT[size]} if size in TRAFFIC_LIMIT else {}
    age_limit = {"limit": AGE_LIMIT_S[size]} if size in AGE_LIMIT_S else {}
    return [
        Row(case, "sent per node, mean", "MB/s", float(nbytes.mean()) / measure_s / 1e6, limits=limit),
        Row(case, "sent per node, most", "MB/s", float(nbytes.max()) / measure_s / 1e6, limits=limit),
        Row(case, "packets sent per node", "1/s", float(packets.mean()) / measure_s),
        Row(case, "CPU per node, simulator included", "% of a core", 100 * cpu_s / measure_s / size),
        Row(case, "age of information p50", "s", float(np.quantile(age, 0.5))),
        Row(case, "age of information p99", "s", float(np.quantile(age, 0.99)), limits=age_limit),
        Row(case, "age of information, most", "s", float(age.max())),
        *summary_rows(case, cluster),
    ]


def summary_rows(case: str, cluster: VirtualCluster) -> list[Row]:
    """Ages of the cells' summaries at the end, if there are several cells."""
    ages = [node.core.summaries(cluster.now + node.clock_offset)["age_s"] for node in cluster.up()]
    age = np.concatenate(ages)
    if not age.size:
        return []
    return [
        Row(case, "summaries of cells held, least", "", min(map(len, ages))),
        Row(case, "age of summaries p99", "s", float(np.quantile(age, 0.99))),
    ]


def true_ages(cluster: VirtualCluster, node: GossipNode) -> np.ndarray:
    """Seconds since each other node wrote its record that this node holds; infinite for a record that never arrived."""
    names, records = node.core.view.table(cluster.now + node.clock_offset)
    ages = cluster.now - records["written_ms"] / 1000
    ages[records["version"] == 0] = np.inf
    ages = ages[[name != node.name for name in names]]
    return np.asarray(ages)


def members(size: int, seed: int, weather: Weather) -> VirtualNetwork[Membership]:
    """`size` membership cores that know each other."""
    rng = random.Random(seed)
    network: VirtualNetwork[Membership] = VirtualNetwork(rng, weather, HEADERS)
    for i in range(size):
        address = (f"10.0.{i >> 8}.{i & 255}", 7000)
        me = Member(f"node-{i}", address, f"{address[0]}:8000", ("prefill",), info={"root": "aa" * 16})
        offset = rng.uniform(-1e6, 1e6)
        core = Membership(network.now + offset, me, presets["lan"], random.Random(rng.getrandbits(64)))
        network.place(VirtualNode(f"node-{i}", core, address, offset))
    known = tuple(node.core.me for node in network.nodes.values())
    for node in network.nodes.values():
        network.feed(node, Learn(tuple(member for member in known if member.node_id != node.name)))
    return network


def detection_rows(size: int, crashes: int, seed: int) -> list[Row]:
    """Nodes crash one after the other; all others are healthy."""
    suspect, dead = [], []
    network = members(size, seed, Weather(loss=LOSS, delay_s=(0.0001, 0.0005)))
    for number in range(crashes):
        network.run(2.0 + network.rng.random())
        name = f"node-{number}"
        network.crash(name)
        crashed_at = network.now
        rest = [node.core for node in network.nodes.values() if node.up]
        network.run_until(lambda: any(status(core, name) for core in rest), 60.0)  # noqa: B023
        suspect.append(network.now - crashed_at)
        network.run_until(lambda: all(status(core, name) >= Status.DEAD for core in rest), 60.0)  # noqa: B023
        dead.append(network.now - crashed_at)
    case, note = f"detection, {size} nodes", f"{crashes} crashes, {LOSS:.0%} loss"
    return [
        Row(case, "first suspicion p50", "s", float(np.quantile(suspect, 0.5)), limits={"limit": 1.0}, note=note),
        Row(case, "first suspicion p99", "s", float(np.quantile(suspect, 0.99))),
        Row(case, "dead for everybody p50", "s", float(np.quantile(dead, 0.5)), limits={"limit": 6.0}),
        Row(case, "dead for everybody, most", "s", float(max(dead)), limits={"limit": 6.0}),
    ]


def status(core: Membership, name: str) -> Status:
    member = core.get(name)
    return Status.DEAD if member is None else member.status


def false_deaths(size: int, hours: float, seed: int) -> tuple[int, int, int, float]:
    """(false deaths, pauses, suspicions refuted, CPU s) of `size` nodes over `hours`; no node really dies."""
    started = time.process_time()
    network = members(size, seed, Weather(loss=LOSS, delay_s=(0.0001, 0.0005)))
    rng, pauses, end = network.rng, 0, network.now + hours * 3600

    def pause(name: str) -> None:
        nonlocal pauses
        pauses += 1
        network.pause(name, PAUSE_S)
        again(name)

    def again(name: str) -> None:
        wait = PAUSE_S - np.log(1 - rng.random()) * 3600 / PAUSES_PER_HOUR
        if network.now + wait < end:
            network.at(network.now + wait, lambda: pause(name))

    for name in network.nodes:
        again(name)
    network.run(end - network.now)
    downs = sum(isinstance(effect, MemberDown) for node in network.nodes.values() for _, effect in node.log)
    refuted = sum(node.core.counters["refutations"] for node in network.nodes.values())
    return downs, pauses, refuted, time.process_time() - started


def false_death_rows(size: int, node_hours: float, jobs: int, seed: int) -> list[Row]:
    hours = node_hours / size / jobs
    with ProcessPoolExecutor(jobs) as pool:
        done = list(pool.map(false_deaths, [size] * jobs, [hours] * jobs, range(seed, seed + jobs)))
    downs, pauses, refuted, cpu_s = (sum(column) for column in zip(*done, strict=True))
    case = f"false deaths, {size} nodes"
    note = f"false deaths: {LOSS:.0%} loss, {PAUSES_PER_HOUR} pauses of {PAUSE_S:g} s per node and hour"
    return [
        Row(case, "node-hours", "h", node_hours, note=note),
        Row(case, "pauses", "", pauses),
        Row(case, "false deaths", "", downs, limits={"limit": 0}),
        Row(case, "suspicions refuted", "", refuted),
        Row(case, "CPU of the simulation", "s", cpu_s),
    ]


def arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_result_flags(parser)
    parser.add_argument("--only", choices=["state", "detection", "false-deaths", "none"], help="one part")
    parser.add_argument("--nodes", type=positive, nargs="+", default=[16, 256, 1024], help="sizes of the state part")
    parser.add_argument("--node-hours", type=above_zero, default=1000.0, help="nodes x hours of the false-deaths part")
    parser.add_argument("--seed", type=natural, default=1)
    parser.add_argument("--jobs", type=positive, default=2, help="processes of the false-deaths part")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    sizes, node_hours, crashes = args.nodes, args.node_hours, 40
    if args.quick:
        sizes, node_hours, crashes = [n for n in sizes if n <= 256], 5.0, 5
    rows: list[Row] = []
    if args.only in (None, "state"):
        for size in sizes:
            warm_s, measure_s = (2.0, 2.0) if args.quick else (3.0, 4.0 if size > 256 else 8.0)
            rows += state_rows(size, warm_s, measure_s, args.seed, cell_nodes=1024)
            if size == 256:
                rows += state_rows(size, warm_s, measure_s, args.seed, stores_per_s=40)
            if size > 256:
                rows += state_rows(size, warm_s, measure_s, args.seed, cell_nodes=256)
            print(f"{size} nodes: done", file=sys.stderr)
    if args.only in (None, "detection"):
        rows += detection_rows(256, crashes, args.seed)
    if args.only in (None, "false-deaths"):
        rows += false_death_rows(50, node_hours, args.jobs, args.seed)
    config = {"preset": "lan", "loss": LOSS, "seed": args.seed, "quick": args.quick, "headers_bytes": HEADERS}
    report(config, rows, args.json)
