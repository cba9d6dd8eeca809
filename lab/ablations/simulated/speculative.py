"""Speculative decoding with prompts found in the pool, and without."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative
from lab.ablations.common.looks import answer_times
from lab.ablations.common.metrics import metric
from lab.simulator.config import SimConfig
from lab.simulator.models.speculation import speculating
from lab.simulator.models.step_models import PRESETS

DRAFTED = 4
PLAIN = "no drafts"
DRAFTS = {PLAIN: None, "n-grams": (0.3, 0.0), "draft model": (0.7, 8.03 / 70.6)}
"""(acceptance, parameters over the target's)"""

KV = {"cold": SimConfig(cache_blocks=0), "warm": SimConfig(pool_blocks=6000)}


def cases(requests: int | None) -> list[Case]:
    work, model = Workload("conversation", min(requests or 6000, 6000)), PRESETS["llama3-70b-8xa800"]
    return [
        Case(
            f"{kv}, {name}",
            config,
            work,
            model=None if draft is None else speculating(model, DRAFTED, *draft),
            look=(answer_times,),
        )
        for kv, config in KV.items()
        for name, draft in DRAFTS.items()
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = []
    for kv in KV:
        gains = [
            f"{relative(values, 'mean answer, s', f'{kv}, {name}', f'{kv}, {PLAIN}')} with {name}"
            for name in DRAFTS
            if name != PLAIN
        ]
        said.append(f"{kv} KV {' and '.join(gains)}")
    warm = relative(values, "mean answer, s", f"warm, {PLAIN}", f"cold, {PLAIN}")
    return (
        f"Time from arrival to the last token against no drafts: {', '.join(said)}. Warm KV instead of cold, without "
        f"drafts: {warm}. Acceptance is assumed, not simulated; scripts/bench.py speculative measures it."
    )


SPECULATIVE = Ablation(
    "speculative",
    "What do drafts gain with cold and with warm KV?",
    f"8P+8D, conversation trace; cold = no node keeps KV. {DRAFTED} drafted tokens: n-grams of the prompt, "
    "free, 30 % accepted; a draft model of the 8B shape on the same nodes, 70 %.",
    cases,
    {
        "mean answer, s": metric("answer_s"),
        "mean TTFT, s": metric("ttft_s", "mean"),
        "mean TBT, ms": metric("tbt_s", "mean", 1000),
    },
    reading,
)
