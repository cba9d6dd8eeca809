"""The cost of the scheduler: placement decisions, block keys, the accept path.

    python scripts/bench.py sched                       all, about a minute
    python scripts/bench.py sched --nodes 16,1024       decisions in clusters of these sizes
    python scripts/bench.py sched --quick --json lab/results/...

A decision has three parts, with given hashes: match the prompt with the digests, shortlist (score all nodes, draw some
to probe), and choose among the answers. Every policy is timed over all three, as a node runs it: the shortlist and the
choice of `mooncake` are compiled C, the other policies are numpy and Python. Policies and sizes take turns. Every turn
begins with uncounted decisions and runs without the garbage collector. A figure is the median over the turns. Times are
wall clock of one process: run it on a machine that is otherwise idle. scripts/bench.py gossip measures gossip's traffic
and CPU.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from cache import keys as key_chain
from engine.front.compiled import cheapest, choose
from lab.bench.common.rank import quantile
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.common.timing import timed
from lab.bench.sched import accept, decision
from lab.bench.sched.accept import Acceptor
from lab.bench.sched.decision import Cluster, Contender
from lab.flag_types import natural
from net.compiled import NotCompiled

GOAL_NODES = 1024
LEAST_NODES = 16
"""Of a synthetic cluster in which some nodes hold a prompt, some do not, and each role is there."""

GOALS = {"p50": 25.0, "p99": 100.0}
"""Microseconds of a whole decision at GOAL_NODES."""

HASH_GOAL_US = 100.0
ACCEPT_GOAL = 2000.0
ACCEPT_TOKENS, ACCEPT_MAX_NODES = 2000, 1024
OURS = "mooncake"
RIVALS = ("mooncake-central-greedy", "dynamo-cost", "least-load", "random")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=sizes_of, default="16,128,1024,10000", help="cluster sizes, joined by commas")
    parser.add_argument("--seed", type=natural, default=1)
    add_result_flags(parser)
    args = parser.parse_args(argv)
    sizes: list[int] = args.nodes
    rounds, decisions = (2, 100) if args.quick else (10, 200)
    rows = hashing(50 if args.quick else 300)
    try:
        cheapest.prepare()
        choose.prepare()
    except NotCompiled as error:
        print(f"shortlists by numpy, choices in Python: {error}")
    clusters = {size: Cluster(size, args.seed) for size in sizes}
    contenders = {
        size: {name: Contender(cluster, name, args.seed) for name in (OURS, *RIVALS)}
        for size, cluster in clusters.items()
    }
    decision.race([one for named in contenders.values() for one in named.values()], rounds, decisions)
    for size, named in contenders.items():
        rows += deciding(named, size)
    acceptors = {size: Acceptor(size, ACCEPT_TOKENS, args.seed) for size in sizes if size <= ACCEPT_MAX_NODES}
    accept.race(list(acceptors.values()), 2 if args.quick else 8, 0.25)
    for size, acceptor in acceptors.items():
        case, limits = f"accept, {size} nodes, {ACCEPT_TOKENS:,} tokens", {"goal": ACCEPT_GOAL}
        rows.append(Row(case, "requests", "1/s", median(acceptor.rates), limits=limits))
    config = {
        "nodes": sizes,
        "rounds": rounds,
        "decisions": decisions,
        "prompt_tokens": decision.PROMPT_TOKENS,
        "seed": args.seed,
    }
    report(config, rows, args.json)
    return 0


def sizes_of(text: str) -> list[int]:
    """'16,1024' -> [16, 1024], each once. Raises ArgumentTypeError."""
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < LEAST_NODES:
        raise argparse.ArgumentTypeError(f"must be numbers of at least {LEAST_NODES} joined by commas, got {text!r}")
    return found


def hashing(repeats: int) -> list[Row]:
    """Times of the keys of a prompt with blocks of 16 tokens: packing the list of ids, and the chain itself."""
    try:
        key_chain.prepare()
    except NotCompiled as error:
        print(f"keys by hashlib: {error}")
    rows = []
    for tokens in (12_000, 128_000):
        ids = list(range(1000, 1000 + tokens))
        packed = array("I", ids)
        chain = timed(partial(key_chain.chain, bytes(16), packed, decision.BLOCK_SIZE), repeats)
        pack = timed(partial(array, "I", ids), repeats)
        limits = {"goal": HASH_GOAL_US} if tokens == 12_000 else {}
        case = f"keys of {tokens:,} tokens"
        rows.append(Row(case, "chain p50", "us", 1e6 * quantile(chain, 0.5), limits=limits))
        rows.append(Row(case, "pack the ids p50", "us", 1e6 * quantile(pack, 0.5)))
    return rows


def deciding(contenders: dict[str, Contender], size: int) -> list[Row]:
    rows = []
    ours = contenders[OURS]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        peers: dict[str, float | None] = {
            rival: 1e6 * contenders[rival].quantile_s("decision", share) for rival in RIVALS
        }
        limits = {"goal": GOALS[name]} if size == GOAL_NODES else {}
        case = f"decision, {size:,} nodes"
        if name == "p50":
            rows.append(Row(case, "floor: one pass of numpy", "us", 1e6 * decision.floor_s(size)))
        samples = {OURS: ours.samples} | {rival: contenders[rival].samples for rival in RIVALS}
        whole = Row(case, f"whole {name}", "us", 1e6 * ours.quantile_s("decision", share), peers, limits)
        rows.append(replace(whole, samples=samples))
        for part in ("match", "shortlist", "choose"):
            rows.append(Row(case, f"{part} {name}", "us", 1e6 * ours.quantile_s(part, share)))
    return rows
