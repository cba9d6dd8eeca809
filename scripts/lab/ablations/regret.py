"""What the missing centre costs: the decentralized scheduler against one that knows everything at once."""

from __future__ import annotations

from dataclasses import replace

from scripts.lab.ablation import Ablation, Case, Estimated, Workload, metric, ratio
from sim.config import SimConfig
from sim.trace import TraceRow

SIZES = (16, 64)
AGES_S = (0.05, 0.2, 1.0, 5.0)


def cases(requests: int | None) -> list[Case]:
    made = []
    for nodes in SIZES:
        factor = nodes // 16
        work = Workload("conversation", min(requests or 4000, 4000), change=Grown(factor))
        base = SimConfig(prefill=nodes // 2, decode=nodes // 2, pool_blocks=6000)
        made.append(Case(f"central, {nodes} nodes", replace(base, placement="mooncake-central-greedy"), work))
        for age in AGES_S:
            config = replace(base, gossip_s=age, delivery_s=0.3 * age)
            label = f"{nodes} nodes, gossip every {age:g} s"
            made.append(Case(label, config, work, series=f"{nodes} nodes", x=age))
    return made


class Grown:
    """`factor` copies of the trace at once, each with prefixes of its own."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, rows: list[TraceRow], seed: int) -> list[TraceRow]:
        span = 1 + max(max(row.hash_ids) for row in rows)
        return [
            replace(row, hash_ids=[b + span * copy for b in row.hash_ids], timestamp_ms=row.timestamp_ms + 97.0 * copy)
            for copy in range(self.factor)
            for row in rows
        ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = []
    for nodes in SIZES:
        for age in AGES_S:
            label = f"{nodes} nodes, gossip every {age:g} s"
            said.append(f"{nodes}/{age:g} s {ratio(values, 'mean TTFT, s', label, f'central, {nodes} nodes') - 1:+.1%}")
    return "Mean TTFT over central: " + ", ".join(said) + ". Goals: at most 5 % at 64 nodes and 0.2 s, 10 % at 1 s."


REGRET = Ablation(
    "regret",
    "What does the missing centre cost, by age of the gossip and size of the cluster?",
    "Half of the nodes prefill, half decode; the trace is copied with prefixes of its own so that load per node is "
    "equal at all sizes; central asks every node at every request, at no cost.",
    cases,
    {"mean TTFT, s": metric("ttft_s", "mean"), "p99 TTFT, s": metric("ttft_s", "p99"), "goodput": metric("goodput")},
    reading,
)
