"""The cost of decentralization: this scheduler against one that knows everything immediately."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, Workload, ratio
from lab.ablations.common.metrics import metrics
from lab.loads.trace import TraceRow
from lab.simulator.config import SimConfig

SIZES = (16, 64, 256)
AGES_S = (0.05, 0.2, 1.0, 5.0)
ROWS = {16: 4000, 64: 2000, 256: 800}
"""Rows of the trace; every 16 nodes get a copy."""


def cases(requests: int | None) -> list[Case]:
    made = []
    for nodes in SIZES:
        factor = nodes // 16
        work = Workload("conversation", min(requests or ROWS[nodes], ROWS[nodes]), change=Grown(factor))
        base = SimConfig(prefill=nodes // 2, decode=nodes // 2, pool_blocks=6000)
        made.append(Case(f"central, {nodes} nodes", replace(base, placement="mooncake-central-greedy"), work))
        for age in AGES_S:
            config = replace(base, gossip_s=age, delivery_s=0.3 * age)
            label = f"{nodes} nodes, gossip every {age:g} s"
            made.append(Case(label, config, work, series=f"{nodes} nodes", x=age))
    return made


class Grown:
    """`factor` simultaneous copies of the trace, each with its own prefixes."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, rows: list[TraceRow], seed: int) -> list[TraceRow]:
        span = 1 + max(max(row.hash_ids) for row in rows)
        return [
            replace(row, hash_ids=[b + span * copy for b in row.hash_ids], timestamp_ms=row.timestamp_ms + 97.0 * copy)
            for copy in range(self.factor)
            for row in rows
        ]


def regret(values: dict[str, dict[str, Estimated]], nodes: int, age: float) -> float:
    return ratio(values, "mean TTFT, s", f"{nodes} nodes, gossip every {age:g} s", f"central, {nodes} nodes") - 1


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = [f"{nodes}/{age:g} s {regret(values, nodes, age):+.1%}" for nodes in SIZES for age in AGES_S]
    return (
        "Mean TTFT over central: " + ", ".join(said) + ". Central is greedy, not optimal, and its own questions cost "
        "nothing here."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    grid = {(nodes, age): regret(values, nodes, age) for nodes in SIZES for age in AGES_S}
    lost = {
        (nodes, age): 100
        * (values[f"central, {nodes} nodes"]["goodput"].mean
           - values[f"{nodes} nodes, gossip every {age:g} s"]["goodput"].mean)
        for nodes, age in grid
    }  # fmt: skip
    at = max(grid, key=lambda place: grid[place])
    where = f"{at[0]} nodes, {at[1]:g} s"
    older = {place: value for place, value in grid.items() if (place[0] == 256 and place[1] <= 1) or place[1] == 1.0}
    aged = max(older, key=lambda place: older[place])
    return [
        Goal("regret in mean TTFT at 64 nodes, 0.2 s", "<= 5 %", f"{grid[64, 0.2]:+.1%}", grid[64, 0.2] <= 0.05),
        Goal(
            "regret at 256 nodes, or 1 s", "<= 10 %", f"{older[aged]:+.1%} ({aged[0]} nodes, {aged[1]:g} s)",
            older[aged] <= 0.10,
        ),
        Goal("the default anywhere in the grid of sizes and ages", "<= 2x central", f"{1 + grid[at]:.2f}x ({where})",
             grid[at] <= 1.0),
        Goal("goodput lost against central, most", "<= 1 point", f"{max(lost.values()):+.2f} points",
             max(lost.values()) <= 1.0),
    ]  # fmt: skip


REGRET = Ablation(
    "regret",
    "What does the missing centre cost, by age of the gossip and size of the cluster?",
    "Half of the nodes prefill, half decode; the trace is copied with prefixes of its own so that load per node is "
    "equal at all sizes; central asks every node at every request, at no cost.",
    cases,
    metrics("mean TTFT, s", "p99 TTFT, s", "goodput"),
    reading,
    goals=goals,
    x_name="seconds between two records of a node",
)
