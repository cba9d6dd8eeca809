"""The benefit of choosing the node, on two nodes that prefill and decode."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import points, relative, told
from lab.ablations.common.metrics import metrics
from lab.ablations.live.case import LiveCase, of_shape
from lab.ablations.live.loads import Shape

SHAPE = Shape(prompt=(900.0, 0.4), answer=(16.0, 0.3), shared=0.9, documents=8, rate=1.2)
NODES, FLAGS = "prefill+decode=2", ("--kv-cache-bytes", "96M")
OURS = "Algorithm 1"
LABELS = {
    "random": "random",
    "load balancing": "least-load",
    "local cache-aware": "local-cache",
    "power of two": "power-of-two",
    OURS: "mooncake",
}


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    others = ", ".join(f"{label} {relative(values, 'mean TTFT, s', label, OURS)}" for label in values if label != OURS)
    return (
        f"Mean TTFT against {OURS}: {others}; found prefixes of random placement "
        f"{points(values, 'hit rate', 'random', OURS)} from {told(values[OURS]['hit rate'], '.1%')}. Two nodes show "
        "the order of policies at best; sixteen are simulated."
    )


SCHEDULING = Ablation(
    "scheduling",
    "What does the choice of the node gain, on two nodes of this machine?",
    "Two nodes that prefill and decode, a core each, 96 MB of KV (4,300 tokens) each, no pool; 90 % of the prompts "
    "begin with half of their length from one of 8 texts, 1.2 requests/s through both doors.",
    lambda requests: [
        LiveCase(label, of_shape("texts", SHAPE), NODES, (*FLAGS, "--placement", name))
        for label, name in LABELS.items()
    ],
    metrics("mean TTFT, s", "p90 TTFT, s", "mean TPOT, ms", "hit rate"),
    reading,
)
