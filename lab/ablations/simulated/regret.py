"""The cost of decentralization: this scheduler against one that knows everything immediately."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, Workload
from lab.ablations.common.evidence import relative, times, weighted
from lab.ablations.common.goals import at_most, largest, percent
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
        made.append(Case(central(nodes), replace(base, placement="mooncake-central-greedy"), work))
        for age in AGES_S:
            config = replace(base, gossip_s=age, delivery_s=0.3 * age)
            made.append(Case(ours(nodes, age), config, work, series=f"{nodes} nodes", x=age))
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


def central(nodes: int) -> str:
    return f"central, {nodes} nodes"


def ours(nodes: int, age: float) -> str:
    return f"{nodes} nodes, gossip every {age:g} s"


def regret(values: dict[str, dict[str, Estimated]], nodes: int, age: float) -> Estimated:
    """Of the mean TTFT, in percent."""
    return percent(times(values, "mean TTFT, s", ours(nodes, age), central(nodes)))


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = [
        f"{nodes}/{age:g} s {relative(values, 'mean TTFT, s', ours(nodes, age), central(nodes))}"
        for nodes in SIZES
        for age in AGES_S
    ]
    return (
        "Mean TTFT over central: " + ", ".join(said) + ". Central is greedy, not optimal, and its own questions cost "
        "nothing here."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    grid = {(nodes, age): regret(values, nodes, age) for nodes in SIZES for age in AGES_S}
    lost = [
        weighted((100.0, values[central(nodes)]["goodput"]), (-100.0, values[ours(nodes, age)]["goodput"]))
        for nodes, age in grid
    ]
    older = {place: found for place, found in grid.items() if (place[0] == 256 and place[1] <= 1) or place[1] == 1.0}
    at, aged = (max(found, key=lambda place: found[place].mean) for found in (grid, older))
    return [
        at_most("regret in mean TTFT at 64 nodes, 0.2 s", "<= 5 %", grid[64, 0.2], 5.0, "+.1f", " %"),
        at_most("regret at 256 nodes, or 1 s", "<= 10 %", older[aged], 10.0, "+.1f", f" % ({ours(*aged)})"),
        at_most(
            "regret of the default anywhere in the grid of sizes and ages", "<= 100 %", grid[at], 100.0, "+.1f",
            f" % ({ours(*at)})",
        ),
        at_most("goodput lost against central, most", "<= 1 point", largest(lost), 1.0, "+.2f", " points"),
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
