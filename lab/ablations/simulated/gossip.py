"""The cost of rare and lost gossip for the placement."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative
from lab.ablations.common.metrics import metrics
from lab.ablations.simulated.regret import Grown
from lab.simulator.config import SimConfig

PERIODS_S = (0.1, 1.0, 5.0)
LOSSES = (0.0, 0.1, 0.5)
CENTRAL = "central"


def label(period: float, loss: float) -> str:
    return f"every {period:g} s, {loss:.0%} lost"


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 2000, 2000), change=Grown(4))
    base = SimConfig(prefill=32, decode=32, pool_blocks=6000)
    made = [Case(CENTRAL, replace(base, placement="mooncake-central-greedy"), work)]
    for loss in LOSSES:
        for period in PERIODS_S:
            config = replace(base, gossip_s=period, delivery_s=0.3 * period, gossip_loss=loss)
            made.append(Case(label(period, loss), config, work, series=f"{loss:.0%} lost", x=period))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = [
        f"{label(period, loss)}: {relative(values, 'mean TTFT, s', label(period, loss), CENTRAL)}"
        for loss in LOSSES
        for period in PERIODS_S
    ]
    return (
        "Mean TTFT over central: "
        + "; ".join(said)
        + ". Loss makes records older by 1 / (1 - loss) periods on average; "
        "the probed nodes answer with their present load, so old records only choose which nodes to probe."
    )


GOSSIP = Ablation(
    "gossip",
    "How often must nodes gossip, and how much of it may be lost?",
    "32P+32D, four copies of the conversation trace; a round delivers each record 0.3 periods later or never, by "
    "chance; these records do not say whether nodes are alive.",
    cases,
    metrics("mean TTFT, s", "p99 TTFT, s", "goodput"),
    reading,
    x_name="seconds between two records of a node",
)
