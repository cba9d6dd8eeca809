"""Two sites over a link: what crosses it, what clients wait for, and the link cut under load and healed.

    python scripts/faults.py cut-sites                        the embedded model, 2 nodes per site; as root
    python scripts/faults.py cut-sites --delay-ms 20 --mbit-s 200 --modes "sites,sites and KV" --json out.json

Every node is a process in a network namespace; a relay in user space is the link between the two sites
(lab/faults/networks/linked_sites.py): congestion control and CPU time of the relay belong to every figure. Each of the
clusters of lab/faults/networks/two_sites.py gets the same requests at the same times (lab/loads/busy_site.py): both
sites read the same documents, and most requests arrive in the west, so some of them move and their KV may follow. All
clusters must return the same tokens. With KV some must cross (not with the tiny model, which computes a prompt sooner),
and in no window of time may more of it come to a site than its budget allows.

Then, in the last cluster, clients of both sites send requests, the link drops everything for --cut-s, and heals. Each
side must go on, and every request must return the tokens of an undisturbed run. The link loses frames only when its
queue is full, or cut. Exit code 1 if a check failed, 3 if network namespaces are not available, with the reason.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from cache.sites.budget import BURST_S
from lab.ablations.live.loads import specs
from lab.bench.common.results import Row
from lab.bench.common.workload import Spec
from lab.faults.checks import differences, form, pause_rows
from lab.faults.client import Body, Load, Stream, each_at
from lab.faults.networks.linked_sites import LinkedSites
from lab.faults.networks.two_sites import (
    EAST,
    KV,
    MODES,
    ONE,
    SIDES,
    UNAWARE,
    WEST,
    TwoSites,
    add_link_flags,
    add_load_flags,
    crossed,
    load_of,
    mode_names,
)
from lab.faults.runner import EMBEDDED, TINY, Run, Scenario, add_model_flag, run
from lab.flag_types import above_zero, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.loads.trace import TraceRow

NODES = "mixed=2"
QUICK_NODES = "mixed=2"
MOST_CUT_S = 60.0
"""A side that has answered nothing for so long after the cut will not."""

LOOK_S = 0.5
"""Between two looks at the bytes that have crossed: each asks every node."""

Crossed = tuple[float, float, float]
"""Monotonic times before and after a look, and the bytes of KV that had come to a site since its start."""

T = TypeVar("T")


def add_flags(parser: ArgumentParser) -> None:
    add_model_flag(parser, EMBEDDED)
    parser.add_argument("--nodes", default=NODES, help="mixed nodes: the first half is the east")
    parser.add_argument(
        "--modes", type=mode_names, default=",".join(MODES), help="clusters of the comparison; the last one is cut"
    )
    add_link_flags(parser)
    add_load_flags(parser)
    parser.add_argument("--cut-bodies", type=positive, default=8, help="different requests during the cut")
    parser.add_argument("--prompt-tokens", type=positive, default=600, help="of each of them")
    parser.add_argument("--tokens", type=positive, default=60, help="output tokens of each of them")
    parser.add_argument("--at-once", type=positive, default=4, help="of them at the same time, of both sites together")
    parser.add_argument("--cut-s", type=above_zero, default=8.0)


def check(args: Namespace) -> None:
    """Raises ValueError or UsageError unless there are nodes for two sites, and a link to cut in the last cluster."""
    TwoSites.of(args)
    if args.tokens < 2:
        raise ValueError(f"--tokens {args.tokens}: the cut must hit running streams, so at least 2")
    if args.modes.split(",")[-1] == ONE:
        raise ValueError(f"--modes {args.modes}: the last one is cut, and {ONE!r} has no link; name another one last")


def play(this: Run) -> None:
    args, sites = this.args, TwoSites.of(this.args)
    rows = load_of(args).rows(args.seed)
    prompts, model, expected = specs(rows, args.seed), this.model_flags(), list[Stream]()
    modes = args.modes.split(",")
    for mode in modes:
        flags = [*model, *sites.flags(mode)]
        with (
            sites.network(mode) as network,
            this.cluster(args.nodes, flags, role_flags=sites.node_flags(mode), network=network) as cluster,
        ):
            found, looks = asyncio.run(_watched(cluster, sites, _load(cluster, sites, rows, prompts)))
            expected = expected or found
            this.wrong += differences(mode, expected, found)
            this.rows += load_rows(mode, found, network.link_bytes())
            if mode == KV:
                kv_rows, wrong = budget_rows(mode, looks, sites.budget_bytes_s, args.model != TINY)
                this.rows += kv_rows
                this.wrong += wrong
            if mode == modes[-1]:
                _cut_under_load(this, mode, cluster, network, sites)


def _load(
    cluster: LocalCluster, sites: TwoSites, rows: Sequence[TraceRow], prompts: Sequence[Spec]
) -> Coroutine[Any, Any, list[Stream]]:
    """The requests of all clusters, each at its time and its site."""
    name = rest.get(f"{cluster.nodes[0].url}/v1/models", cluster.api_key)["data"][0]["id"]
    bodies: list[Body] = [
        {"model": name, "prompt": one.token_ids, "max_tokens": one.output_len, "ignore_eos": True, "temperature": 0}
        for one in prompts
    ]
    doors = sites.doors(cluster, [row.site for row in rows])
    arrivals = [(one.at_s, url) for one, url in zip(prompts, doors, strict=True)]
    return each_at(arrivals, bodies, "load", cluster.api_key)


def _cut_under_load(this: Run, mode: str, cluster: LocalCluster, network: LinkedSites, sites: TwoSites) -> None:
    args = this.args
    bodies = this.bodies(cluster, args.cut_bodies, args.prompt_tokens, args.tokens, args.seed)
    east, west = (sites.at(side)[0] for side in SIDES)
    calm = this.calm(cluster, west, bodies, args.at_once)
    doors = cluster[east].url, cluster[west].url
    loads, (cut_at, healed_at), healed_s = asyncio.run(_cut(this, cluster, network, bodies, doors))
    for side, load in zip(SIDES, loads, strict=True):
        case = f"link cut, clients in the {side}"
        this.judge(case, cluster, calm, load)
        this.rows += pause_rows(case, load.streams, cut_at)
        if not served(load.streams, cut_at, healed_at):
            this.wrong.append(f"the {side} answered nothing that was asked during the cut")
    this.rows.append(Row(mode, "heal to one cluster", "s", healed_s))


def _goes_on(load: Load, begin: float, end: float) -> bool:
    return time.monotonic() > end or served(load.streams, begin, end) > 0


def served(streams: Sequence[Stream], begin: float, end: float) -> int:
    """Requests that began, and got a token, between these times."""
    return sum(begin < one.begun and bool(one.at) and one.at[0] < end for one in streams)


def most_of_budget(looks: Sequence[Crossed], limit: float) -> float:
    """The most KV that came to a site between two looks, as a share of what its budget of `limit` bytes/s lets begin in
    that time and in BURST_S before it. A transfer is counted when it ends, and a bucket at the rate of the budget ends
    BURST_S after it began. Raises ValueError for fewer than two looks."""
    if len(looks) < 2:
        raise ValueError("no window of time without two looks at its ends")
    shares = [
        (after - before) / (limit * (end - begin + 2 * BURST_S))
        for i, (begin, _, before) in enumerate(looks)
        for _, end, after in looks[i + 1 :]
    ]
    return max(shares)


def budget_rows(
    mode: str, looks: Mapping[str, Sequence[Crossed]], limit: float, pays: bool = True
) -> tuple[list[Row], list[str]]:
    """(the KV that came over the link, and its most in one window, of the site where that is most; what is wrong).
    looks: of each side; pays: whether KV must have crossed."""
    nbytes = sum(ones[-1][2] - ones[0][2] for ones in looks.values())
    shares = {side: most_of_budget(ones, limit) for side, ones in looks.items()}
    wrong = [
        f"{mode}: more KV came to the {side} than the budget of {limit:.0f} bytes/s lets begin"
        for side, most in shares.items()
        if most > 1.0
    ]
    if pays and not nbytes:
        wrong.append(f"{mode}: no KV crossed the link, so its budget is not tested")
    most = Row(mode, "most KV in one window", "of the budget", max(shares.values()), limits={"most": 1.0})
    return [Row(mode, "KV over the link", "MB", nbytes / 1e6), most], wrong


def load_rows(mode: str, streams: Sequence[Stream], link: tuple[int, int]) -> list[Row]:
    """First tokens of the load, and what has crossed the link since the start."""
    waits = [one.at[0] - one.begun for one in streams if one.at]
    p50, p99 = (float(np.percentile(waits, share)) if waits else float("nan") for share in (50, 99))
    return [
        Row(mode, "requests", "", float(len(streams))),
        Row(mode, "errors", "", float(sum(bool(one.error) for one in streams)), limits={"goal": 0.0}),
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
        # Nothing is awaited between this look and the cut, so on each side a stream is cut that wants more tokens.
        await east.until(lambda: min(load.under_way(this.args.tokens // 2) for load in (east, west)) >= 1)
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


async def _watched(
    cluster: LocalCluster, sites: TwoSites, work: Coroutine[Any, Any, T]
) -> tuple[T, dict[str, list[Crossed]]]:
    """The result of `work`, and looks at what the nodes of each side had read from the other one: before it, during it,
    after it."""
    looks: dict[str, list[Crossed]] = {side: [] for side in SIDES}

    async def look() -> None:
        for side in SIDES:
            begin = time.monotonic()
            nbytes = await asyncio.to_thread(crossed, cluster, sites.at(side))
            looks[side].append((begin, time.monotonic(), nbytes))

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await look()

    await look()
    looking = asyncio.create_task(keep_looking())
    try:
        done = await work
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
    await look()
    return done, looks


main = partial(
    run,
    Scenario(
        __doc__,
        add_flags,
        play,
        check=check,
        quick={
            "nodes": QUICK_NODES,
            "modes": f"{UNAWARE},{KV}",
            "model": TINY,
            "arena_mb": 2,
            "pool_mb": 32,
            "requests": 40,
            "cut_bodies": 4,
            "prompt_tokens": 200,
            "tokens": 40,
            "cut_s": 5.0,
        },
    ),
)
