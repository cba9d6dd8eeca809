"""Two cores as one prefill and one decode node, or as two mixed nodes under each batching policy."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.metrics import metrics
from lab.ablations.live.case import LiveCase, of_shape
from lab.ablations.live.loads import Shape

WORK = of_shape("unique prompts", Shape(prompt=(600.0, 0.8), answer=(48.0, 0.4), shared=0.0, rate=1.2))
CHUNKS = (64, 128, 256, 512)
MIXED = "prefill+decode=2"
POLICIES = ("decode-first", "dynamic", "prefill-first")


def cases(requests: int | None) -> list[LiveCase]:
    made = [LiveCase("1P+1D", WORK, "prefill=1,decode=1")]
    made += [LiveCase(f"2 mixed, {name}", WORK, MIXED, ("--batching-policy", name)) for name in POLICIES]
    for chunk in CHUNKS:
        flags = ("--batching-policy", "mixed", "--prefill-chunk-tokens", str(chunk))
        made.append(LiveCase(f"2 mixed, chunk {chunk}", WORK, MIXED, flags, series="2 mixed", x=chunk))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    mixed = [label for label in values if label.startswith("2 mixed")]
    best = max(mixed, key=lambda label: (values[label]["effective"].mean, -values[label]["mean TTFT, s"].mean))
    split, other, gap = values["1P+1D"], values[best], "p99 longest gap, ms"
    return (
        f"The best mixed configuration is '{best}': {other['effective'].mean:.1%} effective, mean TTFT "
        f"{other['mean TTFT, s'].mean:.2f} s, p99 gap {other[gap].mean:.0f} ms; split nodes: "
        f"{split['effective'].mean:.1%}, {split['mean TTFT, s'].mean:.2f} s, {split[gap].mean:.0f} ms."
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
