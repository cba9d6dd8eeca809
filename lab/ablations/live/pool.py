"""Hit rates of real nodes: with local caches or a pool, over networks of several speeds."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import points, relative, sign, told
from lab.ablations.common.metrics import metrics
from lab.ablations.live.case import LiveCase, of_shape
from lab.ablations.live.kv import POOL_WORK
from lab.ablations.live.placement import FLAGS, SHAPE

MBYTE_S = (10, 30, 100, 300)
RECOMPUTE, CHOSEN = "recompute", "as placement finds it cheaper"
TEXTS = of_shape("texts", SHAPE)
METRICS = metrics("mean TTFT, s", "p90 TTFT, s", "hit rate")


def label(rate: int) -> str:
    return f"{rate} MB/s"


def bandwidth_cases(requests: int | None) -> list[LiveCase]:
    nodes, kv = "prefill+decode=1,store=1", ("--kv-cache-bytes", "80M")
    slowest = ("--rail-limit", str(MBYTE_S[0] * 10**6))
    made = [LiveCase(RECOMPUTE, POOL_WORK, nodes, (*kv, "--prefix-fetch", "never"))]
    for rate in MBYTE_S:
        flags = ("--rail-limit", str(rate * 10**6), "--prefix-fetch", "always")
        made.append(LiveCase(label(rate), POOL_WORK, nodes, (*kv, *flags), series="fetched", x=rate))
    made.append(LiveCase(CHOSEN, POOL_WORK, nodes, (*kv, *slowest, "--prefix-fetch", "auto")))
    return made


def bandwidth_reading(values: dict[str, dict[str, Estimated]]) -> str:
    paying = [rate for rate in MBYTE_S if sign(values, "mean TTFT, s", label(rate), RECOMPUTE) < 0]
    at = f"at {', '.join(map(str, paying))} MB/s" if paying else "at none of these rates"
    chosen = relative(values, "mean TTFT, s", CHOSEN, RECOMPUTE)
    return (
        f"Computing takes {told(values[RECOMPUTE]['mean TTFT, s'], '.2f', ' s')}; fetching is shown to be faster {at}. "
        f"At {MBYTE_S[0]} MB/s a node that may choose takes, against computing: {chosen}. The paper's step is between "
        "24 and 40 Gbit/s, for another model on other machines: the ratio of KV bytes to the seconds of computing them "
        "decides."
    )


BANDWIDTH = Ablation(
    "bandwidth",
    "Above which bandwidth does a real node gain from the pool?",
    "One node that prefills and decodes with 80 MB of KV (3,600 tokens), one store node; every prompt begins with half "
    "of its length from one of 8 texts, transfers limited by --rail-limit; recompute: --prefix-fetch never.",
    bandwidth_cases,
    METRICS,
    bandwidth_reading,
    x_name="transfers of a node, MB/s",
)


def pool_reading(values: dict[str, dict[str, Estimated]]) -> str:
    names = ("local, least load", "local, Algorithm 1")
    hits = ", ".join(f"{name} {points(values, 'hit rate', name, 'global')}" for name in names)
    gains = ", ".join(f"{name} {relative(values, 'mean TTFT, s', name, 'global')}" for name in names)
    return (
        f"Found with the pool: {told(values['global']['hit rate'], '.1%')}; without it {hits}. Mean TTFT without the "
        f"pool: {gains}. Two nodes and a third process on the same cores are not the paper's ten nodes."
    )


POOL = Ablation(
    "pool",
    "What does a pool gain over a cache per node, on two real nodes?",
    "Two nodes that prefill and decode, a core each, 96 MB of KV (4,300 tokens) each; 90 % of the prompts begin with "
    "half of their length from one of 8 texts, 1.2 requests/s through both doors. Global: an additional store node.",
    lambda requests: [
        LiveCase("local, least load", TEXTS, "prefill+decode=2", (*FLAGS, "--placement", "least-load")),
        LiveCase("local, Algorithm 1", TEXTS, "prefill+decode=2", (*FLAGS, "--placement", "mooncake")),
        LiveCase("global", TEXTS, "prefill+decode=2,store=1", (*FLAGS, "--placement", "mooncake")),
    ],
    METRICS,
    pool_reading,
)
