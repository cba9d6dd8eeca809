"""FAST'25 Fig. 14: one request at a time, by the length of its prompt, with nothing or nearly everything cached."""

from __future__ import annotations

from dataclasses import dataclass

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative, told
from lab.ablations.common.goals import largest
from lab.ablations.common.looks import last_request
from lab.ablations.common.metrics import metric
from lab.loads.trace import BLOCK_TOKENS, TraceRow
from lab.simulator.config import SimConfig

KTOKENS = (8, 16, 32, 64, 128)
ANSWER = 128
PAPER = {  # prefill, total
    0.0: ((0.96, 4.5), (2.07, 5.6), (4.44, 8.3), (10.6, 14.8), (27.5, 32.4)),
    0.95: ((0.14, 3.66), (0.23, 3.86), (0.41, 4.24), (0.89, 5.03), (2.33, 7.24)),
}
APART_MS = 1e6


@dataclass(frozen=True, slots=True)
class Alone:
    """Replaces the rows by one prompt, of which the leading share `hit` was computed long before."""

    tokens: int
    hit: float

    def __call__(self, rows: list[TraceRow], seed: int) -> list[TraceRow]:
        blocks = list(range(self.tokens // BLOCK_TOKENS))
        known = blocks[: int(self.hit * len(blocks))]
        before = [TraceRow(0.0, len(known) * BLOCK_TOKENS, 1, known)] if known else []
        return [*before, TraceRow(APART_MS, self.tokens, ANSWER, blocks)]


def label(hit: float, ktokens: int) -> str:
    return f"{ktokens}k, {hit:.0%} found"


def cases(requests: int | None) -> list[Case]:
    # Nodes keep no KV of their own, so every hit crosses the network.
    config = SimConfig(prefill=1, decode=1, cache_blocks=0, pool_blocks=6000)
    return [
        Case(
            label(hit, ktokens), config, Workload("conversation", 1, change=Alone(1024 * ktokens, hit)),
            look=(last_request,), series=f"{hit:.0%} found", x=ktokens,
        )
        for hit in PAPER
        for ktokens in KTOKENS
    ]  # fmt: skip


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    cold, warm = (label(hit, 128) for hit in PAPER)
    first, whole = (relative(values, name, warm, cold) for name in ("TTFT, s", "whole request, s"))

    def off(hit: float) -> Estimated:
        """The largest distance from the paper: relative without hits, in seconds with hits."""
        found = []
        for place, ktokens in enumerate(KTOKENS):
            theirs, ours = PAPER[hit][place][0], values[label(hit, ktokens)]["TTFT, s"]
            scale = 1.0 if hit else 1 / theirs
            found.append(Estimated(scale * abs(ours.mean - theirs), scale * ours.half))
        return largest(found)

    return (
        f"Reuse changes TTFT at 128k by {first} and the whole request by {whole} (paper: prefill -92 %, TTFT -86 %, "
        "whole request -78 %). The rows without hits are what the step model was fitted to (off by at most "
        f"{told(off(0.0), '.0%')}, answers too); those with hits follow from it and the network (off by at most "
        f"{told(off(0.95), '.2f', ' s')})."
    )


BREAKDOWN = Ablation(
    "breakdown",
    "Where does the time of one request go?",
    f"1P+1D, idle; answers of {ANSWER} tokens; none or 95 % of the prompt is in the pool.",
    cases,
    {"TTFT, s": metric("last_ttft_s"), "whole request, s": metric("last_total_s")},
    reading,
    {label(hit, k): PAPER[hit][i][0] for hit in PAPER for i, k in enumerate(KTOKENS)},
    "FAST'25 Fig. 14, prefill",
    x_name="prompt, thousand tokens",
)
