"""SIGKILL one node of each role under load: no client error, the same tokens, and how long a stream pauses.

    python scripts/faults.py kill-roles                     2 nodes of each role with a tiny random model
    python scripts/faults.py kill-roles --shape single --model embedded
                                                            one node per role, with the model that nodes serve by
                                                            default; a killed node restarts
    python scripts/faults.py kill-roles --streams 32 --tokens 400 --json out.json

For each role in turn, streams start, and once half of them have a third of their tokens the node is killed. 'acceptor'
is the clients' node: they reconnect to another one with the request's id and the number of tokens they have. If all
streams have ended before that, others start: a node dies only while streams run. Every stream must return exactly the
tokens of the undisturbed run, and afterwards every node's books must be balanced with nothing held. The memory of a
process that lives on must not grow from role to role. Then the node restarts for the next role; with --shape single it
restarts by the same command, and requests wait for it. Exit code 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lab.faults.checks import GOAL_S, RESTART_GOAL_S, form, pause_rows
from lab.faults.client import Body, Load
from lab.faults.runner import TINY, Run, Scenario, add_model_flag, run
from lab.flag_types import names_of, positive
from lab.launch.cluster import DEFAULT_NODES, LocalCluster


@dataclass(frozen=True, slots=True)
class Shape:
    """The nodes, the victim for each role, and the clients' doors by role: (first, after its loss)."""

    nodes: str
    victims: dict[str, str]
    doors: dict[str, tuple[str, str]]
    again: bool  # the victim restarts while the streams run

    def doors_of(self, role: str) -> tuple[str, str]:
        return self.doors.get(role, self.doors[""])


SHAPES = {
    "pairs": Shape(
        "prefill=2,decode=2,store=2",
        {"decode": "decode-0", "prefill": "prefill-0", "store": "store-0", "acceptor": "store-1"},
        {"": ("store-1", "store-0")},
        again=False,
    ),
    "single": Shape(
        DEFAULT_NODES,
        {"decode": "decode-0", "prefill": "prefill-0", "store": "store-0", "acceptor": "store-0"},
        {"": ("store-0", "prefill-0"), "store": ("prefill-0", "prefill-0")},
        again=True,
    ),
}


LEAST_TOKENS = 3

TRIES = 10
"""How often streams start until some of them are under way when the node is to be killed."""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--streams", type=positive, default=16, help="concurrent requests")
    parser.add_argument("--tokens", type=positive, default=200, help="output tokens of each request")
    parser.add_argument("--prompt-tokens", type=positive, default=300)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="pairs", help="two nodes per role, or one")
    add_model_flag(parser, TINY)
    roles = tuple(SHAPES["pairs"].victims)
    parser.add_argument("--roles", type=names_of(*roles), default=",".join(roles), help="roles to kill, in this order")


def check(args: Namespace) -> None:
    """Raises ValueError for answers that are over before a third of them."""
    if args.tokens < LEAST_TOKENS:
        raise ValueError(f"--tokens {args.tokens}: a node is killed after a third of them, so at least {LEAST_TOKENS}")


def play(this: Run) -> None:
    args, shape = this.args, SHAPES[this.args.shape]
    this.facts = {"nodes": shape.nodes}
    with this.cluster(shape.nodes, this.model_flags()) as cluster:
        bodies = this.bodies(cluster, args.streams, args.prompt_tokens, args.tokens, args.seed)
        calm = this.calm(cluster, shape.doors_of("")[0], bodies)
        for role in args.roles.split(","):
            case = f"{role} killed"
            load, killed_at = asyncio.run(_killed(cluster, shape, bodies, role, args.tokens))
            if shape.again:
                form(cluster)
            this.judge(case, cluster, calm, load)
            this.rows += pause_rows(case, load.streams, killed_at, RESTART_GOAL_S if shape.again else GOAL_S)
            if not shape.again:
                cluster.restart(shape.victims[role])
                form(cluster)


async def _killed(
    cluster: LocalCluster, shape: Shape, bodies: Sequence[Body], role: str, tokens: int
) -> tuple[Load, float]:
    """Runs all streams together. The node of the role dies when half of them have a third of their tokens; the prefill
    node when the first has a token, while the other prompts are computed. Returns (load, time of its death)."""
    doors, victim = [cluster[door].url for door in shape.doors_of(role)], shape.victims[role]
    due, most = (1, 1) if role == "prefill" else (tokens // 3, len(bodies) / 2)
    for number in range(TRIES):
        async with Load(doors, bodies, f"{role}-{number}", once=True, salted=True) as load:
            await load.until(lambda: load.with_tokens(due) >= most)
            if load.under_way(tokens - 1):  # nothing is awaited between this look and the death
                died = time.monotonic()
                (cluster.repeat if shape.again else cluster.kill)(victim)
                break
    else:
        raise TimeoutError(f"{TRIES} times all streams had ended before the {role} node could die: raise --tokens")
    return load, died


main = partial(run, Scenario(__doc__, add_flags, play, check=check, quick={"streams": 6, "tokens": 80}))
