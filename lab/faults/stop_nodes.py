"""SIGSTOP one node under load for longer than every deadline of the others, SIGCONT, again: nothing stays held.

    python scripts/faults.py stop-nodes                  one node of each role, embedded model, under 3 minutes
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
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

from lab.bench.common.results import Row
from lab.faults.checks import form
from lab.faults.client import Body, Load
from lab.faults.runner import EMBEDDED, Run, Scenario, add_model_flag, run
from lab.flag_types import above_zero, positive
from lab.launch import rest
from lab.launch.cluster import DEFAULT_NODES, LocalCluster
from lab.launch.nodes import parse_nodes

DOOR = "store-0"
BUSY_S = 120.0


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", default=DEFAULT_NODES, help=f"clients talk to {DOOR}")
    add_model_flag(parser, EMBEDDED)
    parser.add_argument("--victims", default="prefill-0", help="nodes to stop, one per round in turn")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--stop-s", type=above_zero, default=16.0, help="how long a node is stopped, seconds")
    parser.add_argument("--clients", type=positive, default=8)
    parser.add_argument("--prompt-tokens", type=positive, default=600)
    parser.add_argument("--tokens", type=positive, default=24, help="output tokens of each request")


def check(args: Namespace) -> None:
    """Raises ValueError or UsageError for victims that cannot be stopped at work."""
    roles = dict(parse_nodes(args.nodes))
    if DOOR not in roles:
        raise ValueError(f"--nodes {args.nodes}: clients talk to {DOOR}, which is missing")
    able = [name for name, role in roles.items() if role != "store"]
    if strange := [name for name in args.victims.split(",") if name not in able]:
        raise ValueError(f"--victims {strange[0]!r} is none of the nodes that compute: {', '.join(able)}")


def play(this: Run) -> None:
    args, victims = this.args, this.args.victims.split(",")
    with this.cluster(args.nodes, this.model_flags()) as cluster:
        bodies = this.bodies(cluster, args.clients, args.prompt_tokens, args.tokens, args.seed)
        calm = this.calm(cluster, DOOR, bodies)
        for number in range(args.rounds):
            victim = victims[number % len(victims)]
            case = f"round {number + 1}: {victim} stopped"
            load = asyncio.run(_stopped(args, cluster, victim, bodies, f"round{number}"))
            this.judge(case, cluster, calm, load)
            this.rows.append(Row(case, "refused while it stood still", "", float(load.refused)))


async def _stopped(args: Namespace, cluster: LocalCluster, victim: str, bodies: Sequence[Body], name: str) -> Load:
    async with Load([cluster[DOOR].url], bodies, name, salted=True, insists=True) as load:
        await asyncio.to_thread(_until_busy, cluster, victim)
        os.kill(cluster[victim].pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(args.stop_s)
        finally:
            os.kill(cluster[victim].pid, signal.SIGCONT)
        await asyncio.to_thread(form, cluster)
        load.insists = False  # new requests after the stop must work as before it: a refusal is an error
        sent = len(load.requests)
        await load.until(lambda: len(load.requests) >= sent + args.clients)
    return load


def _until_busy(cluster: LocalCluster, victim: str) -> None:
    """Wait until the victim, and the decode nodes for it, hold something for requests. Raises TimeoutError."""
    deadline = time.monotonic() + BUSY_S
    while rest.get(f"{cluster[victim].url}/debug/state")["engine"]["held_for_requests"]["requests"] < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{victim} had no two requests at a time in {BUSY_S:g} s: raise --clients")
        time.sleep(0.01)


main = partial(
    run,
    Scenario(
        __doc__,
        add_flags,
        play,
        check=check,
        quick={"model": "tiny", "rounds": 2, "clients": 4, "prompt_tokens": 400},
    ),
)
