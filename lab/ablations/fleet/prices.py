"""Cheap and slow nodes with dear and fast ones: placement by cost, against placement by time alone."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import points, relative
from lab.ablations.common.metrics import metric, metrics
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.making import price

TTFT_S, TBT_S = 10.0, 0.1
NODES, CHEAP = (8, 4), (4, 2)
"""Prefill and decode nodes; the number of cheap ones among them."""
SPEED, COST = 0.5, 0.3
SPEEDS = (0.5, 1.0)
POLICIES = {"mooncake": "by time", "mooncake-cost": "by cost"}
BUSY = "cost of busy time per million good tokens"


def where(cluster: Cluster) -> dict[str, float]:
    """The shares of prompt tokens and of answer tokens that cheap nodes computed."""
    cheap = {node.name for node in cluster.nodes if price(cluster.config, node) == COST}
    jobs = cluster.jobs
    prompts = sum(job.input_tokens for job in jobs if job.prefill in cheap) / sum(job.input_tokens for job in jobs)
    answers = sum(job.output_tokens for job in jobs if job.decode in cheap) / sum(job.output_tokens for job in jobs)
    return {"cheap_prompts": prompts, "cheap_answers": answers}


def label(policy: str, speed: float, scaled: bool) -> str:
    return f"{POLICIES[policy]}, {speed:g} x the load{', nodes leave' if scaled else ''}"


def cases(requests: int | None) -> list[Case]:
    count = min(requests or 6000, 6000)
    classes = ",".join(
        f"{role}:{cheap}:{SPEED:g}:{COST:g}" for role, cheap in zip(("prefill", "decode"), CHEAP, strict=True)
    )
    base = SimConfig(
        prefill=NODES[0], decode=NODES[1], node_classes=classes, slo=f"standard:ttft={TTFT_S:g},tbt={TBT_S:g}"
    )
    scaled = replace(base, autoscale=f"prefill=1..{NODES[0]},decode=1..{NODES[1]}")

    def case(name: str, config: SimConfig, speed: float) -> Case:
        return Case(name, config, Workload("conversation", count, speed), TTFT_S, TBT_S, look=(where,))

    return [
        case(label(policy, speed, leave), replace(scaled if leave else base, placement=policy), speed)
        for speed in SPEEDS
        for leave in (False, True)
        for policy in POLICIES
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    by_time, by_cost = POLICIES
    parts = []
    for speed in SPEEDS:
        for leave, name in ((False, BUSY), (True, "cost per million good tokens")):
            time, cost = (label(policy, speed, leave) for policy in (by_time, by_cost))
            parts.append(
                f"at {speed:g} times the load{', if nodes leave,' if leave else ''} cost "
                f"{relative(values, name, cost, time)}, effective requests {points(values, 'effective', cost, time)}"
            )
    return (
        "Placement by cost against placement by time, cost per million good tokens (of busy time if all nodes stay, "
        f"of all paid time if nodes leave): {'; '.join(parts)}."
    )


PRICES = Ablation(
    "prices",
    "What does placement by cost save if nodes differ in speed and price?",
    f"Conversation trace on {NODES[0]}P+{NODES[1]}D, of which {CHEAP[0]}P+{CHEAP[1]}D compute at {SPEED:g} of the "
    f"speed and cost {COST:g} per hour instead of 1; effective = TTFT <= {TTFT_S:g} s and mean TBT <= "
    f"{1000 * TBT_S:g} ms.",
    cases,
    metrics("effective", "mean TTFT, s", "p99 TTFT, s")
    | {
        BUSY: metric("busy_cost_per_million_tokens"),
        "prompts on cheap nodes": metric("cheap_prompts"),
        "answers on cheap nodes": metric("cheap_answers"),
    },
    reading,
)
