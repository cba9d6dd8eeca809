"""Slow and cheap nodes next to fast and dear ones on this machine: placement by cost, by time alone, and by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import points, relative, told
from lab.ablations.common.metrics import metric, metrics
from lab.ablations.fleet.prices import BUSY, COST, SPEED
from lab.ablations.live.case import LiveCase, of_shape
from lab.ablations.live.loads import Shape
from lab.ablations.live.play import Played
from lab.ablations.live.run import TBT_SLO_S, TTFT_SLO_S
from lab.ablations.live.throttle import Slow
from lab.launch import rest

NODES, NUM_NODES = "prefill=2,decode=2", 4
SLOW = Slow(("prefill-1", "decode-0"), SPEED, COST)
"""One of each role. On two cores, each has a fast and a slow node."""

BY_COST, BY_TIME, RANDOM = "by cost", "by time", "random"
POLICIES = {BY_COST: "mooncake-cost", BY_TIME: "mooncake", RANDOM: "random"}
FLAGS = ("--slo", f"standard:ttft={TTFT_SLO_S:g},tbt={TBT_SLO_S:g}")
PROMPT, ANSWER = 200.0, 24.0
RATES = (1.0, 4.0)


def where(urls: Sequence[str]) -> Callable[[Played], dict[str, float]]:
    """The shares of prompt tokens and of answer tokens that fast nodes computed, from the timelines. Raises RestError,
    ValueError."""
    if len(urls) != NUM_NODES:
        raise ValueError("unlike slows nodes of its own down: leave --url out")

    def figures(played: Played) -> dict[str, float]:
        ids = [one.request_id for one in played.outcomes if one.error is None]
        return on_fast(rest.get(f"{urls[0]}/live/requests/{name}")["summary"] for name in ids)

    return figures


def on_fast(summaries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of requests that succeeded, at least one. A request that moved counts where it ended."""
    found = list(summaries)

    def share(role: str, tokens: str) -> float:
        fast = sum(one[tokens] for one in found if one["nodes"][role] not in SLOW.nodes)
        return float(fast / sum(one[tokens] for one in found))

    return {"fast_prompts": share("prefill", "prompt_tokens"), "fast_answers": share("decode", "output_tokens")}


def label(policy: str, rate: float) -> str:
    return f"{policy}, {rate:g} requests/s"


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = []
    for rate in RATES:
        cost = label(BY_COST, rate)
        against = "; ".join(
            f"against {name} goodput {points(values, 'goodput', cost, label(name, rate))}, mean TTFT "
            f"{relative(values, 'mean TTFT, s', cost, label(name, rate))}, {BUSY} "
            f"{relative(values, BUSY, cost, label(name, rate))}"
            for name in (BY_TIME, RANDOM)
        )
        shares = " and ".join(
            f"{told(values[cost][f'{what} on fast nodes'], '.0%')} of the {what}" for what in ("prompts", "answers")
        )
        said.append(f"at {rate:g} requests/s fast nodes compute {shares}; {against}")
    ran = " and ".join(told(values[label(BY_COST, rate)]["slow nodes ran"], ".1%") for rate in RATES)
    return f"Placement by cost: {'. '.join(said)}. The slow nodes could run for {ran} of the time."


UNLIKE = Ablation(
    "unlike",
    "What does placement by cost save between fast and slow nodes of this machine?",
    f"2P+2D, a core each as far as there are, one of each role stopped and continued every 10 ms so that it runs for "
    f"{SPEED:.0%} of the time, at a price of {COST:g} per hour instead of 1; prompts of {PROMPT:g} tokens on average, "
    f"answers of {ANSWER:g}; objectives: TTFT <= {TTFT_SLO_S:g} s and mean TBT <= {1000 * TBT_SLO_S:g} ms. Busy time "
    "is CPU time of the threads that compute, over the share of the time in which they could run.",
    lambda requests: [
        LiveCase(
            label(name, rate),
            of_shape(f"{rate:g} requests/s", Shape((PROMPT, 0.5), (ANSWER, 0.3), shared=0.0, rate=rate)),
            NODES,
            (*FLAGS, "--placement", policy),
            series=name,
            x=rate,
            look=where,
            slow=SLOW,
        )
        for rate in RATES
        for name, policy in POLICIES.items()
    ],
    metrics("goodput", "mean TTFT, s", "p99 TTFT, s", "mean TPOT, ms")
    | {
        BUSY: metric("busy_cost_per_million_tokens"),
        "prompts on fast nodes": metric("fast_prompts"),
        "answers on fast nodes": metric("fast_answers"),
        "slow nodes ran": metric("ran"),
    },
    reading,
    x_name="requests/s",
)
