"""The scheduler's signals in addition to load records, each with and without. The signals are claims on prefixes that
are being computed, summaries of other cells, rails, and nodes that report a slowdown."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative
from lab.ablations.common.metrics import metrics
from lab.loads.trace import TraceRow
from lab.simulator.config import SimConfig

BURST_EVERY_S, BURST_S, BURST_REQUESTS, BURST_BLOCKS = 5.0, 1.0, 16, 32
NEVER = 1e9

OFF = {
    "bursts": {"intents": False},
    "conversation": {"intents": False},
    "one cell is crowded": {"cell_s": NEVER},
    "all KV in the pool": {"links": "learnt"},
    "a node 4 times slower": {"detect_s": NEVER},
}
"""The change that removes the signal in each situation."""


def bursts(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """The trace plus, every few seconds, a burst of requests about a new document of 16k tokens."""
    rng, last = Random(seed), max(row.timestamp_ms for row in rows) / 1000
    made, at, block = list(rows), 0.0, 1 << 40
    while (at := at + BURST_EVERY_S) < last:
        document = list(range(block, block + BURST_BLOCKS))
        block += BURST_BLOCKS + BURST_REQUESTS
        for number in range(BURST_REQUESTS):
            when = 1000 * (at + BURST_S * rng.random())
            ids = [*document, document[-1] + 1 + number]
            made.append(TraceRow(when, 512 * BURST_BLOCKS + 200, 64, ids))
    return sorted(made, key=lambda row: row.timestamp_ms)


def cases(requests: int | None) -> list[Case]:
    count = min(requests or 2400, 2400)
    pooled, alone = SimConfig(pool_blocks=6000), SimConfig(prefill=16, decode=16)
    # 64 nodes in cells of at most 16; every request arrives at acceptors of the first cell.
    cells = SimConfig(prefill=32, decode=32, cell_nodes=16, entry_skew=1.0)
    remote = replace(pooled, cache_blocks=0, nic_gbit_s=200.0, links="rails")
    slow = replace(pooled, faults="slow:prefill-0@60+100000x4")
    quiet = Workload("conversation", count, speed=0.5)
    plain = Workload("conversation", count)
    made = {
        "bursts": (alone, replace(quiet, change=bursts)),
        "conversation": (pooled, plain),
        "one cell is crowded": (cells, plain),
        "all KV in the pool": (remote, plain),
        "a node 4 times slower": (slow, plain),
    }
    found = []
    for name, (config, work) in made.items():
        found.append(Case(name, config, work))
        found.append(Case(f"{name}, unheard", replace(config, **OFF[name]), work))  # type: ignore[arg-type]
    return found


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    parts = [f"{name} {relative(values, 'mean TTFT, s', f'{name}, unheard', name)}" for name in OFF]
    return (
        "Mean TTFT without the signal: " + "; ".join(parts) + ". Except the plain trace, every load is made "
        "so that its signal matters."
    )


SIGNALS = Ablation(
    "signals",
    "What is each of the scheduler's signals worth?",
    "Pairs on the conversation trace: claims on new prefixes (bursts of 16 requests about one new document of 16k "
    "tokens on 16P+16D, and the plain trace), summaries of cells (32P+32D in cells of 16, all requests arrive at one "
    "cell), rails (8P+8D, KV kept only in the pool, 200 Gbit/s; without them a path is learned from its transfers), "
    "residuals (one of 8 prefill nodes becomes 4 times slower).",
    cases,
    metrics("mean TTFT, s", "p99 TTFT, s", "hit rate", "goodput"),
    reading,
)
