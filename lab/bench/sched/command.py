"""The cost of the scheduler: placement decisions, block keys, the accept path.

    python scripts/bench.py sched                       all, about a minute
    python scripts/bench.py sched --nodes 16,1024       decisions in clusters of these sizes
    python scripts/bench.py sched --quick --json lab/results/...

A decision has three parts, with given hashes: match the prompt with the digests, shortlist (score all nodes, draw some
to probe), and choose among the answers. Every policy is timed over all three. Times are wall clock of one process: run
it on a machine that is otherwise idle. scripts/bench.py gossip measures gossip's traffic and CPU.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Sequence
from functools import partial

from cache import keys as key_chain
from engine.front import cheapest
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.common.timing import timed
from lab.bench.sched import accept, decision
from lab.bench.sched.decision import Cluster, quantile, times
from net.compiled import NotCompiled

GOAL_NODES = 1024
GOALS = {"p50": 25.0, "p99": 100.0}
"""Microseconds of a whole decision at GOAL_NODES."""

HASH_GOAL_US = 100.0
ACCEPT_GOAL = 2000.0
RIVALS = ("mooncake-central-greedy", "dynamo-cost", "least-load", "random")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="16,128,1024,10000", help="cluster sizes, joined by commas")
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser)
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.nodes.split(",")]
    decisions = 200 if args.quick else 2000
    rows = hashing(50 if args.quick else 300)
    try:
        cheapest.prepare()
    except NotCompiled as error:
        print(f"shortlists by numpy: {error}")
    for size in sizes:
        cluster = Cluster(size, args.seed)
        rows += deciding(cluster, size, decisions)
    for size in sizes:
        if size <= 1024:
            rate = accept.requests_per_s(size, 2000, 0.5 if args.quick else 2.0, args.seed)
            limits = {"goal": ACCEPT_GOAL}
            rows.append(Row(f"accept, {size} nodes, 2,000 tokens", "requests", "1/s", rate, limits=limits))
    config = {"nodes": sizes, "decisions": decisions, "prompt_tokens": decision.PROMPT_TOKENS, "seed": args.seed}
    report(config, rows, args.json)
    return 0


def hashing(repeats: int) -> list[Row]:
    """Times of the keys of a prompt with blocks of 16 tokens: packing the list of ids, and the chain itself."""
    try:
        key_chain.prepare()
    except key_chain.NotCompiled as error:
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


def deciding(cluster: Cluster, size: int, decisions: int) -> list[Row]:
    rows = []
    found = times(cluster, "mooncake", decisions)
    rivals = {name: times(cluster, name, decisions) for name in RIVALS}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        peers: dict[str, float | None] = {
            rival: 1e6 * quantile(their["decision"], share) for rival, their in rivals.items()
        }
        limits = {"goal": GOALS[name]} if size == GOAL_NODES else {}
        case = f"decision, {size:,} nodes"
        if name == "p50":
            rows.append(Row(case, "floor: one pass of numpy", "us", 1e6 * decision.floor_s(size)))
        rows.append(Row(case, f"whole {name}", "us", 1e6 * quantile(found["decision"], share), peers, limits))
        for part in ("match", "shortlist", "choose"):
            rows.append(Row(case, f"{part} {name}", "us", 1e6 * quantile(found[part], share)))
    return rows
