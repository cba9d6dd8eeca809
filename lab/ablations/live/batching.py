"""Two cores as one prefill and one decode node, or as two mixed nodes under each batching policy."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import best_of, leaders, points, relative, told
from lab.ablations.common.metrics import metrics
from lab.ablations.live.case import LiveCase, of_shape
from lab.ablations.live.loads import Shape

WORK = of_shape("unique prompts", Shape(prompt=(600.0, 0.8), answer=(48.0, 0.4), shared=0.0, rate=1.2))
SPLIT, GAP = "1P+1D", "p99 longest gap, ms"
CHUNKS = (64, 128, 256, 512)
MIXED = "prefill+decode=2"
POLICIES = ("decode-first", "dynamic", "prefill-first")
TOLLS, NO_TOLLS = "2 mixed, dynamic", "2 mixed, dynamic without tolls"


def cases(requests: int | None) -> list[LiveCase]:
    made = [LiveCase(SPLIT, WORK, "prefill=1,decode=1")]
    made += [LiveCase(f"2 mixed, {name}", WORK, MIXED, ("--batching-policy", name)) for name in POLICIES]
    made.append(LiveCase(NO_TOLLS, WORK, MIXED, ("--batching-policy", "dynamic", "--no-placement-tolls")))
    for chunk in CHUNKS:
        flags = ("--batching-policy", "mixed", "--prefill-chunk-tokens", str(chunk))
        made.append(LiveCase(f"2 mixed, chunk {chunk}", WORK, MIXED, flags, series="2 mixed", x=chunk))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    mixed = {label: f"'{label}'" for label in values if label.startswith("2 mixed")}
    best = leaders(values, "effective", list(mixed))[0]
    return (
        f"Of the mixed ones, by effective requests {best_of(values, 'effective', mixed)}. Split nodes against "
        f"{mixed[best]}: effective {points(values, 'effective', SPLIT, best)}, mean TTFT "
        f"{relative(values, 'mean TTFT, s', SPLIT, best)}, p99 gap {relative(values, GAP, SPLIT, best)}; they have "
        f"{told(values[SPLIT]['effective'], '.1%')}, {told(values[SPLIT]['mean TTFT, s'], '.2f', ' s')} and "
        f"{told(values[SPLIT][GAP], '.0f', ' ms')}. Tolls against none: effective "
        f"{points(values, 'effective', TOLLS, NO_TOLLS)}, mean TTFT "
        f"{relative(values, 'mean TTFT, s', TOLLS, NO_TOLLS)}, p99 gap {relative(values, GAP, TOLLS, NO_TOLLS)}."
    )


COLOCATED = Ablation(
    "colocated",
    "Disaggregation or chunked prefill, on two cores?",
    "The same two cores; prompts of 600 tokens on average, answers of 48, 1.2 requests/s; effective = TTFT <= 2 s and "
    "mean TBT <= 100 ms; chunk = --batching-policy mixed with --prefill-chunk-tokens.",
    cases,
    metrics("effective", "mean TTFT, s", "mean TPOT, ms", "p99 longest gap, ms"),
    reading,
    x_name="tokens of a chunk",
)
