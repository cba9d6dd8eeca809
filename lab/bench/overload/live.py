"""Overload of real nodes: one prefill and one decode node of the embedded model, one core each.

The capacity is the number of requests that the two nodes finish per second when all of them arrive at the start; then
each rejection variant gets requests at --load times that rate. The wasted prefill is computed from the prefill node's
own count of computed tokens.
"""

from __future__ import annotations

import sys
import urllib.request
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.ablations.live.loads import Shape, requests, specs
from lab.ablations.live.play import doors, pinned, play, warmed
from lab.bench.common.client import Outcome
from lab.bench.common.latency import tpot_s
from lab.bench.common.results import Row
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from sched.classes import STANDARD, ServiceClass, with_objectives

NODES = "prefill=1,decode=1"
SHAPE = Shape(prompt=(400.0, 0.5), answer=(64.0, 0.5), shared=0.0, most=1500)
CAPACITY_REQUESTS = 32
COMPUTED = "vllm:iteration_tokens_total_sum"
REFUSED, REFUSED_IN_STREAM = "status 429", "in the stream: estimated time per token"
"""A decode node refuses a request after its first token, which the prefill node has computed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One variant's run: the clients' measurements over `offered` seconds, and the tokens that the prefill node
    computed."""

    outcomes: Sequence[Outcome]
    seconds: float
    computed: float
    wanted: ServiceClass  # the class that the nodes used, scaled


def measure(args: Namespace, variants: Sequence[str], folder: Path) -> tuple[dict[str, object], list[Row]]:
    """(configuration, rows). Raises OSError, ValueError, Unreachable, NodeDied, StartTimeout."""
    capacity = args.capacity or _capacity(args, folder)
    rate = args.load * capacity
    print(f"seed {args.seed}: capacity {capacity:.2f} requests/s, offered {rate:.2f}", file=sys.stderr)
    rows: list[Row] = []
    for variant in variants:
        seen = _overloaded(args, variant, rate, folder / variant)
        rows += rows_of(f"--rejection {variant}", seen, capacity)
        print(f"{variant}: {len(seen.outcomes)} requests", file=sys.stderr)
    shape = {"prompt": SHAPE.prompt, "answer": SHAPE.answer}
    return {"nodes": NODES, "capacity_per_s": capacity, "seconds": args.seconds, **shape}, rows


def _flags(args: Namespace, variant: str) -> list[str]:
    return ["--rejection", variant, "--slo-scale", str(args.slo_scale), "--max-num-seqs", "64"]


def _capacity(args: Namespace, folder: Path) -> float:
    """Requests finished per second when CAPACITY_REQUESTS arrive together."""
    with pinned(NODES, _flags(args, "none"), folder / "capacity") as cluster:
        warmed(doors(cluster))
        rows = requests(replace(SHAPE, rate=1000.0), args.seed + 1, 1.0)[:CAPACITY_REQUESTS]
        played = play(doors(cluster), specs(rows, args.seed + 1))
    failed = [one.error for one in played.outcomes if one.error is not None]
    if failed:
        raise ValueError(f"{len(failed)} requests fail without any rejection: {failed[0]}")
    return len(played.outcomes) / played.seconds


def _overloaded(args: Namespace, variant: str, rate: float, folder: Path) -> Seen:
    with pinned(NODES, _flags(args, variant), folder) as cluster:
        config = rest.get(f"{cluster.nodes[0].url}/debug/state")["config"]
        warmed(doors(cluster))
        before = _computed(cluster)
        offered = specs(requests(replace(SHAPE, rate=rate), args.seed, args.seconds), args.seed)
        outcomes = play(doors(cluster), offered).outcomes
        return Seen(outcomes, args.seconds, _computed(cluster) - before, objectives(config))


def _computed(cluster: LocalCluster) -> float:
    """Tokens computed in all steps of the prefill nodes."""
    open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    texts = [open_url(f"{n.url}/metrics", timeout=10).read().decode() for n in cluster.nodes if n.role == "prefill"]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(COMPUTED)]
    return sum(float(line.split()[-1]) for line in lines)


def objectives(config: Mapping[str, Any]) -> ServiceClass:
    """The objectives by which a node with this configuration judges the requests of the benchmark."""
    of_class, scale = with_objectives(config["slo"])[STANDARD.name], float(config["slo_scale"])
    return replace(of_class, ttft_s=of_class.ttft_s * scale, tbt_s=of_class.tbt_s * scale)


def rows_of(case: str, seen: Seen, capacity: float) -> list[Row]:
    """Shares refer to the requests, and shares of prefill to the tokens computed for prompts. Requests that failed
    without a refusal are listed separately; there should be none."""
    ttft_s, tbt_s = seen.wanted.ttft_s, seen.wanted.tbt_s
    done = [one for one in seen.outcomes if one.error is None]
    after = [one for one in seen.outcomes if (one.error or "").startswith(REFUSED_IN_STREAM)]
    refused = [one for one in seen.outcomes if (one.error or "").startswith(REFUSED)] + after
    others = {one.error for one in seen.outcomes if one.error} - {one.error for one in refused}
    late = [one for one in done if one.ttft_s > ttft_s]
    slow = [one for one in done if one.ttft_s <= ttft_s and tpot_s(one) > tbt_s]
    good = len(done) - len(late) - len(slow)
    offered, computed = len(seen.outcomes), max(1.0, seen.computed)
    missed = sum(one.prompt_tokens for one in [*late, *slow])
    wasted = max(0.0, computed - sum(one.prompt_tokens for one in done))
    return [
        Row(case, "goodput", "1/s", good / seen.seconds, limits={"capacity": capacity}),
        Row(case, "refused", "share", len(refused) / offered),
        Row(case, "refused after prefill", "share", len(after) / offered, note="; ".join(sorted(others))),
        Row(case, "late to the first token", "share", len(late) / offered),
        Row(case, "slow to decode", "share", len(slow) / offered),
        Row(case, "failed otherwise", "share", (offered - len(done) - len(refused)) / offered),
        Row(case, "prefill wasted on refused", "share", wasted / computed),
        Row(case, "prefill spent on late", "share", missed / computed),
    ]
