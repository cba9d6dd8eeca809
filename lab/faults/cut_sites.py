"""Two sites over a slow link: what crosses it, what clients wait for, and the link cut under load and healed.

    python scripts/faults.py cut-sites                        the embedded model, 2 nodes per site; as root
    python scripts/faults.py cut-sites --delay-ms 5 --mbit-s 1000 --json out.json

Every node is a process in a network namespace; a relay in user space is the link between the two sites
(lab/faults/networks/linked_sites.py): congestion control and CPU time of the relay belong to every figure. In each of
three clusters all documents are asked for in the west first, then in the east:

    no sites        the nodes know nothing of the link
    sites           --site: requests may move, no KV
    sites and KV    --site-link-limit-bytes, a part of the link

Then, in the last one, clients of both sites send requests, the link drops everything for --cut-s, and heals. Each
side must go on, every request must return the tokens of an undisturbed run, and the KV that crossed must be within the
budget. Exit code 1 if a check failed, 3 if network namespaces are not available, with the reason.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

import numpy as np

from engine.observe.node_client import NodeClient
from lab.bench.common.results import Row
from lab.faults.checks import differences, form, pause_rows
from lab.faults.client import Body, Load, Stream, each_once
from lab.faults.networks.linked_sites import LinkedSites
from lab.faults.runner import EMBEDDED, TINY, Run, Scenario, add_model_flag, run
from lab.flag_types import above_zero, positive
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import parse_nodes

NODES = "mixed=4"
QUICK_NODES = "mixed=2"
EAST, WEST = "east", "west"
MODES = ("no sites", "sites", "sites and KV")
MOST_CUT_S = 60.0
"""A side that has answered nothing for so long after the cut will not."""

BURST_S = 0.5
"""Of the budget (cache/sites/budget.py)."""


def add_flags(parser: ArgumentParser) -> None:
    add_model_flag(parser, EMBEDDED)
    parser.add_argument("--nodes", default=NODES, help="mixed nodes: the first half is the east")
    parser.add_argument("--modes", default=",".join(MODES), help="clusters of the comparison; the last one is cut")
    parser.add_argument("--delay-ms", type=above_zero, default=20.0, help="one way")
    parser.add_argument("--mbit-s", type=above_zero, default=200.0, help="bandwidth of the link in one direction")
    parser.add_argument("--kv-share", type=above_zero, default=0.5, help="part of the bandwidth that KV may use")
    parser.add_argument("--documents", type=positive, default=12)
    parser.add_argument("--prompt-tokens", type=positive, default=600)
    parser.add_argument("--tokens", type=positive, default=60, help="output tokens of each request")
    parser.add_argument("--at-once", type=positive, default=4, help="requests at the same time in each round")
    parser.add_argument("--cut-s", type=above_zero, default=8.0)


def play(this: Run) -> None:
    args = this.args
    names = [name for name, _ in parse_nodes(args.nodes)]
    east, west = names[: len(names) // 2], names[len(names) // 2 :]
    limit = int(args.kv_share * args.mbit_s * 1e6 / 8)
    model = [*this.model_flags(), "--transport", "tcp", "--net", "local"]
    for mode in args.modes.split(","):
        of_node = {name: ["--site", EAST if name in east else WEST] for name in names} if mode != MODES[0] else {}
        flags = [*model, "--site-link-limit-bytes", str(limit if mode == MODES[-1] else 0)]
        with (
            LinkedSites(names, west, args.delay_ms, args.mbit_s) as network,
            this.cluster(args.nodes, flags, role_flags=of_node, network=network) as cluster,
        ):
            bodies = this.bodies(cluster, args.documents, args.prompt_tokens, args.tokens, args.seed)
            begun = time.monotonic()
            calm = this.calm(cluster, west[0], bodies, args.at_once)
            url, key = cluster[east[0]].url, cluster.api_key
            again = asyncio.run(each_once(url, bodies, "again", key, args.at_once))
            this.wrong += differences(mode, calm, again)
            this.rows += round_rows(mode, again, network.link_bytes())
            if mode == MODES[-1]:
                doors = cluster[east[0]].url, cluster[west[0]].url
                loads, (cut_at, healed_at), healed_s = asyncio.run(_cut(this, cluster, network, bodies, doors))
                for side, load in zip((EAST, WEST), loads, strict=True):
                    case = f"link cut, clients in the {side}"
                    this.judge(case, cluster, calm, load)
                    this.rows += pause_rows(case, load.streams, cut_at)
                    if not served(load.streams, cut_at, healed_at):
                        this.wrong.append(f"the {side} answered nothing that was asked during the cut")
                this.rows.append(Row(mode, "heal to one cluster", "s", healed_s))
                crossed, seconds = _crossed(cluster), time.monotonic() - begun
                this.rows.append(Row(mode, "KV over the link", "MB", crossed / 1e6))
                if crossed > 2 * limit * (seconds + BURST_S):  # both directions
                    this.wrong.append(
                        f"{crossed:.0f} bytes of KV in {seconds:.1f} s exceed the budget of {limit} bytes/s"
                    )


def _goes_on(load: Load, begin: float, end: float) -> bool:
    return time.monotonic() > end or served(load.streams, begin, end) > 0


def served(streams: Sequence[Stream], begin: float, end: float) -> int:
    """Requests that began, and got a token, between these times."""
    return sum(begin < one.begun and bool(one.at) and one.at[0] < end for one in streams)


def round_rows(mode: str, streams: Sequence[Stream], link: tuple[int, int]) -> list[Row]:
    """First tokens of the second round, and what has crossed the link since the start in both rounds."""
    waits = [one.at[0] - one.begun for one in streams if one.at]
    p50, p99 = (float(np.percentile(waits, share)) if waits else float("nan") for share in (50, 99))
    return [
        Row(mode, "first token p50", "s", p50),
        Row(mode, "first token p99", "s", p99),
        Row(mode, "east to west", "MB", link[0] / 1e6),
        Row(mode, "west to east", "MB", link[1] / 1e6),
    ]


async def _cut(
    this: Run, cluster: LocalCluster, network: LinkedSites, bodies: Sequence[Body], doors: tuple[str, str]
) -> tuple[list[Load], tuple[float, float], float]:
    """(the loads of the two sites, begin and end of the cut, seconds from its end until all nodes are one cluster)"""
    key, clients = cluster.api_key, max(1, this.args.at_once // 2)
    east, west = (
        Load([door], bodies, f"cut-{side}", clients=clients, insists=True, api_key=key)
        for side, door in zip((EAST, WEST), doors, strict=True)
    )
    async with east, west:
        await east.until(lambda: east.with_tokens(1) >= 1)
        await west.until(lambda: west.with_tokens(1) >= 1)
        network.cut_link()
        cut_at = time.monotonic()
        await asyncio.sleep(this.args.cut_s)
        late = cut_at + MOST_CUT_S
        for load in (east, west):  # each side must go on before the link does
            await load.until(partial(_goes_on, load, cut_at, late))
        network.heal_link()
        healed_at = time.monotonic()
        await asyncio.to_thread(form, cluster)
        healed_s = time.monotonic() - healed_at
    return [east, west], (cut_at, healed_at), healed_s


def _crossed(cluster: LocalCluster) -> float:
    """Bytes of KV that all nodes have read from the other site."""
    found = [NodeClient(node.url, cluster.api_key).text("/metrics").splitlines() for node in cluster.nodes]
    counters = [line for lines in found for line in lines if line.startswith("mooncake:site_link_bytes_total{")]
    return sum(float(line.split()[-1]) for line in counters)


main = partial(
    run,
    Scenario(
        __doc__,
        add_flags,
        play,
        quick={
            "nodes": QUICK_NODES,
            "modes": f"{MODES[0]},{MODES[-1]}",
            "model": TINY,
            "documents": 4,
            "prompt_tokens": 200,
            "tokens": 40,
            "cut_s": 5.0,
        },
    ),
)
