"""v3 Table 3: who is turned away at twice the load."""

from __future__ import annotations

from scripts.lab.ablation import Ablation, Case, Estimated, Workload, metric
from sim.config import SimConfig

VARIANTS = {
    "baseline": "stage-load",
    "early rejection": "early",
    "early with prediction": "predicted",
    "nobody": "none",
}


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", requests, speed=4.0)
    return [
        Case(label, SimConfig(rejection=name, pool_blocks=6000, slo_scale=6.0), work, 30.0, 0.2)
        for label, name in VARIANTS.items()
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    refused = [values[label]["refused"].mean for label in list(VARIANTS)[:3]]
    if refused[0] > refused[1] > refused[2]:
        order = "falls from variant to variant as in the paper"
    else:
        order = "is the same for all" if len(set(refused)) == 1 else "does not fall as in the paper"
    return (
        f"The number refused {order}. Prefill is the scarce stage on this trace, and the variants differ only where "
        "decode is; the arXiv trace of the paper is not public."
    )


OVERLOAD = Ablation(
    "overload",
    "Whom to refuse when everybody cannot be served?",
    "8P+8D, the conversation trace four times as fast; objectives of the standard class times six (30 s, 0.6 s).",
    cases,
    {
        "refused": metric("refused"),
        "goodput": metric("goodput"),
        "good requests/s": metric("good_requests_s"),
        "wasted prefill tokens": metric("wasted_prefill_tokens"),
    },
    reading,
    {"baseline": 4183, "early rejection": 3771, "early with prediction": 3589},
    "v3 Table 3, of about 23,000 requests",
)
