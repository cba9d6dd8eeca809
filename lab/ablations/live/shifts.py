"""Loads that are hard for caches on real nodes: lengths without a mean, a viral prefix, prefixes that flip."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import points, relative
from lab.ablations.common.metrics import metrics
from lab.ablations.live.case import LiveCase, Workload
from lab.ablations.live.loads import scaled, specs
from lab.bench.common.workload import Spec
from lab.loads.generators import GENERATORS

LOADS = {"pareto": "pareto", "viral": "goes-viral", "flip": "popular"}
"""Name -> a generator of lab/loads/generators.py; the last two change in the middle of the requests."""
RATE_S = 1.5
NODES, FLAGS = "prefill+decode=2", ("--kv-cache-bytes", "96M")
OURS, PLAIN = "mooncake", "random"


def generated(name: str, seed: int, seconds: float, rate_s: float = RATE_S) -> list[Spec]:
    """About rate_s requests per second of this load, an eighth of its lengths: its whole course fits into `seconds`."""
    rows = GENERATORS[LOADS[name]](seed, max(4, round(rate_s * seconds)))
    return specs(scaled(rows, rate_s, seconds), seed)


def workload(name: str) -> Workload:
    return Workload(name, lambda seed, seconds: generated(name, seed, seconds))


def label(name: str, placement: str) -> str:
    return f"{name}, {placement}"


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = "; ".join(
        f"{name}: mean TTFT {relative(values, 'mean TTFT, s', label(name, OURS), label(name, PLAIN))}, p99 "
        f"{relative(values, 'p99 TTFT, s', label(name, OURS), label(name, PLAIN))}, hit rate "
        f"{points(values, 'hit rate', label(name, OURS), label(name, PLAIN))}"
        for name in LOADS
    )
    return f"Placement {OURS} against {PLAIN}: {said}."


SHIFTS = Ablation(
    "shifts",
    "What do loads that are hard for caches do to two nodes of this machine?",
    f"Two nodes that prefill and decode, a core each, 96 MB of KV (4,300 tokens) each, no pool; {RATE_S:g} requests/s "
    "through both doors, lengths an eighth of the generated ones. Pareto: lengths without a mean; viral: from the "
    "middle on 80 % of the prompts begin with one prefix; flip: all popular prefixes are replaced in the middle.",
    lambda requests: [
        LiveCase(label(name, placement), workload(name), NODES, (*FLAGS, "--placement", placement), series=name)
        for name in LOADS
        for placement in (OURS, PLAIN)
    ],
    metrics("mean TTFT, s", "p99 TTFT, s", "mean TPOT, ms", "hit rate", "goodput"),
    reading,
)
