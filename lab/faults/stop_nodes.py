"""SIGSTOP one node under load for longer than every deadline of the others, SIGCONT, again: nothing stays held.

    python scripts/faults.py stop-nodes                  prefill=1,decode=1,store=1 with the embedded model, about 5
    minutes
    python scripts/faults.py stop-nodes --victims prefill-0,decode-0 --rounds 5 --stop-s 16 --json out.json

Clients at the store node send one request after the other, with prompts that are not cached. In every round SIGSTOP
stops the victim while prompts are computed, and SIGCONT continues it after --stop-s. While the only node of a role is
stopped, new requests may be refused with 503 (the clients count them and send them again); a request that has a token
must end with exactly the tokens of an undisturbed run. After every round all nodes are one cluster, every node's books
are balanced, and no block is held. Memory may not grow from round to round. Exit code 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

from lab.bench.common.results import Row
from lab.faults.checks import form, growth_rows, memory_of
from lab.faults.client import Body, Load, Stream, each_once
from lab.faults.runner import Run, Scenario, run
from lab.launch import rest
from lab.launch.cluster import DEFAULT_NODES, LocalCluster

DOOR = "store-0"
SPARE_REQUESTS = 4  # spare requests, which replace excluded ones
GROWTH_BYTES = 48 << 20
"""Maximum growth of a node's resident memory from the end of the first round to the end of the last."""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", default=DEFAULT_NODES, help=f"clients talk to {DOOR}")
    parser.add_argument("--model", default="", help="a model, or 'tiny' for a random one; empty = the embedded model")
    parser.add_argument("--victims", default="prefill-0", help="nodes to stop, one per round in turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stop-s", type=float, default=16.0, help="how long a node is stopped, seconds")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")


def play(this: Run) -> None:
    args, victims = this.args, this.args.victims.split(",")
    this.facts = {"model": args.model or "embedded", "dtype": "float32"}
    flags = ["--dtype", "float32", *(["--model", args.model] if args.model else [])]
    samples = []
    with this.cluster(args.nodes, this.tiny() if args.model == "tiny" else flags) as cluster:
        bodies = this.bodies(cluster, args.clients + SPARE_REQUESTS, args.prompt_tokens, args.tokens, args.seed)
        bodies, calm = _untied(this, cluster, bodies, args.clients)
        for number in range(args.rounds):
            victim = victims[number % len(victims)]
            case = f"round {number + 1}: {victim} stopped"
            load = asyncio.run(_stopped(args, cluster, victim, bodies, f"round{number}"))
            failed = this.compare(case, calm, load)
            this.settle(cluster)
            samples.append(memory_of(cluster))
            this.rows += [
                Row(case, "requests", "", float(len(load.streams))),
                Row(case, "refused while it stood still", "", float(load.refused)),
                Row(case, "errors and wrong tokens", "", float(failed), limits={"goal": 0.0}),
                Row(case, "blocks held afterwards", "", float(_held(cluster)), limits={"goal": 0.0}),
            ]
        rows, grown = growth_rows(samples, GROWTH_BYTES, "the first round")
        this.rows += rows
        this.wrong += grown


def _held(cluster: LocalCluster) -> int:
    engines = [rest.get(f"{node.url}/debug/state")["engine"] for node in cluster.nodes]
    return sum(engine["blocks"]["held"] for engine in engines if engine is not None)


def _untied(this: Run, cluster: LocalCluster, bodies: Sequence[Body], count: int) -> tuple[list[Body], list[Stream]]:
    """`count` of the requests and their undisturbed tokens. Excludes requests whose tokens depend on concurrent
    requests, because two tokens are equally likely up to rounding."""
    alone = this.calm(cluster, DOOR, [body | {"cache_salt": "alone"} for body in bodies], at_once=1)
    salted = [body | {"cache_salt": "beside"} for body in bodies]
    beside = asyncio.run(each_once(cluster[DOOR].url, salted, "beside"))
    same = [i for i, one in enumerate(alone) if one.tokens == beside[i].tokens]
    print(f"{len(bodies) - len(same)} of {len(bodies)} requests are tied and excluded", file=sys.stderr)
    return [bodies[i] for i in same[:count]], [alone[i] for i in same[:count]]


async def _stopped(args: Namespace, cluster: LocalCluster, victim: str, bodies: Sequence[Body], name: str) -> Load:
    async with Load([cluster[DOOR].url], bodies, name, salted=True, insists=True) as load:
        await asyncio.to_thread(_until_busy, cluster, victim)
        os.kill(cluster[victim].pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(args.stop_s)
        finally:
            os.kill(cluster[victim].pid, signal.SIGCONT)
        await asyncio.to_thread(form, cluster)
        sent = len(load.requests)
        # New requests after the stop must work as before it.
        await load.until(lambda: len(load.requests) >= sent + args.clients)
    return load


def _until_busy(cluster: LocalCluster, victim: str) -> None:
    """Wait until the victim, and the decode nodes for it, hold something for requests."""
    while rest.get(f"{cluster[victim].url}/debug/state")["engine"]["held_for_requests"]["requests"] < 2:
        time.sleep(0.01)


main = partial(
    run,
    Scenario(
        __doc__,
        add_flags,
        play,
        quick={"model": "tiny", "rounds": 2, "clients": 4, "prompt_tokens": 400},
        config=("nodes", "victims", "rounds", "stop_s", "clients", "prompt_tokens", "tokens"),
    ),
)
