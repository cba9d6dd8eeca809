"""Overload of real nodes: twice the load that a prefill and a decode node can serve, by rejection variant."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import best_of, relative, told
from lab.ablations.common.metrics import metric
from lab.ablations.live.case import LiveCase, Workload
from lab.ablations.live.loads import Shape, requests, specs
from lab.ablations.live.play import Played, doors, pinned, play, warmed
from lab.bench.common.latency import tpot_s
from lab.bench.common.workload import Spec
from lab.launch import rest
from sched.classes import STANDARD, ServiceClass, scaled, with_objectives
from sched.rejection import rejections

NODES = "prefill=1,decode=1"
LOAD, SLO_SCALE = 2.0, 0.6
FLAGS = ("--slo-scale", str(SLO_SCALE), "--max-num-seqs", "64")
SHAPE = Shape(prompt=(400.0, 0.5), answer=(64.0, 0.5), shared=0.0, most=1500)
CAPACITY_REQUESTS, CAPACITY_SEED = 32, 2
COMPUTED = "vllm:iteration_tokens_total_sum"
REFUSED, REFUSED_IN_STREAM = "status 429", "in the stream: estimated time per token"
"""A decode node refuses a request after its first token, which the prefill node has computed."""


@lru_cache(maxsize=1)
def capacity() -> float:
    """Requests that the two nodes finish per second when CAPACITY_REQUESTS arrive together and none is refused. Raises
    ValueError, Unreachable, NodeDied, StartTimeout."""
    rows = requests(replace(SHAPE, rate=1000.0), CAPACITY_SEED, 1.0)[:CAPACITY_REQUESTS]
    with (
        tempfile.TemporaryDirectory(prefix="capacity-") as folder,
        pinned(NODES, ("--rejection", "none", *FLAGS), Path(folder) / "nodes") as cluster,
    ):
        warmed(doors(cluster))
        played = play(doors(cluster), specs(rows, CAPACITY_SEED))
    failed = [one.error for one in played.outcomes if one.error is not None]
    if failed:
        raise ValueError(f"{len(failed)} requests fail without any rejection: {failed[0]}")
    return len(played.outcomes) / played.seconds


def offered(seed: int, seconds: float) -> list[Spec]:
    return specs(requests(replace(SHAPE, rate=LOAD * capacity()), seed, seconds), seed)


def look(urls: Sequence[str]) -> Callable[[Played], dict[str, float]]:
    """The prefill node counts the tokens that it computes. Raises RestError, ValueError."""
    if len(urls) != 2:
        raise ValueError("overload counts what its own prefill node computes: leave --url out")
    before = computed(urls[0])

    def figures(played: Played) -> dict[str, float]:
        found = shares(played, computed(urls[0]) - before)
        return found | {"good_s": found["good"] * LOAD * capacity(), "capacity_s": capacity()}

    return figures


def computed(url: str) -> float:
    """Tokens computed in all steps of this node."""
    lines = rest.text(f"{url}/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(COMPUTED))


def objectives(config: Mapping[str, Any]) -> ServiceClass:
    """The objectives by which a node with this configuration judges the requests."""
    return scaled(with_objectives(config["slo"]), float(config["slo_scale"]))[STANDARD.name]


def shares(played: Played, computed: float) -> dict[str, float]:
    """Shares refer to the requests, and shares of prefill to the tokens `computed` for prompts."""
    wanted = objectives(played.config or {})
    done = [one for one in played.outcomes if one.error is None]
    after = [one for one in played.outcomes if (one.error or "").startswith(REFUSED_IN_STREAM)]
    refused = [one for one in played.outcomes if (one.error or "").startswith(REFUSED)] + after
    late = [one for one in done if one.ttft_s > wanted.ttft_s]
    slow = [one for one in done if one.ttft_s <= wanted.ttft_s and tpot_s(one) > wanted.tbt_s]
    total, computed = len(played.outcomes), max(1.0, computed)
    return {
        "good": (len(done) - len(late) - len(slow)) / total,
        "refused_part": len(refused) / total,
        "refused_after": len(after) / total,
        "late": len(late) / total,
        "slow": len(slow) / total,
        "failed": (total - len(done) - len(refused)) / total,
        "wasted": max(0.0, computed - sum(one.prompt_tokens for one in done)) / computed,
        "missed": sum(one.prompt_tokens for one in [*late, *slow]) / computed,
    }


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    names = {label: label.removeprefix("--rejection ") for label in values}
    nobody = next(iter(values))
    said = ", ".join(
        f"{name} {told(values[label]['goodput'], '.2f')} ({told(values[label]['refused'], '.0%')} refused; "
        f"{relative(values, 'goodput', label, nobody)})"
        for label, name in names.items()
        if label != nobody
    )
    served = told(values[nobody]["capacity"], ".2f", " requests/s")
    return (
        f"The nodes can serve {served}. Good requests/s, and against {names[nobody]} with "
        f"{told(values[nobody]['goodput'], '.2f')}: {said}; {best_of(values, 'goodput', names)}."
    )


OVERLOAD = Ablation(
    "overload",
    "Which requests should two real nodes refuse when they cannot serve all?",
    f"1P+1D, a core each, prompts of 400 tokens on average, answers of 64, at {LOAD:g} times the requests/s that the "
    f"nodes finish when {CAPACITY_REQUESTS} arrive together; objectives of the class standard times {SLO_SCALE}. "
    "Goodput: requests/s that meet both; prefill: shares of the computed prompt tokens.",
    lambda requests: [
        LiveCase(
            f"--rejection {name}",
            Workload("twice the capacity", offered),
            NODES,
            ("--rejection", name, *FLAGS),
            look=look,
        )
        for name in rejections
    ],
    {
        "goodput": metric("good_s"),
        "refused": metric("refused_part"),
        "refused after prefill": metric("refused_after"),
        "late to the first token": metric("late"),
        "slow to decode": metric("slow"),
        "failed otherwise": metric("failed"),
        "prefill wasted on refused": metric("wasted"),
        "prefill spent on late": metric("missed"),
        "capacity": metric("capacity_s"),
    },
    reading,
)
