"""Parked or least recently used: the KV of agents and people between their turns, by the DRAM of the pool."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative, sign, told
from lab.ablations.common.metrics import metric, metrics
from lab.simulator.config import SimConfig

REQUESTS = 4000
CACHE, SSD, GBYTE_S = 60, 4000, 2.0
"""Blocks of a node's own cache and of its SSD, and the bandwidth of that."""
DRAM = (60, 120, 200)
"""Blocks of a node's share of the pool in DRAM."""
ALL = "all of it in DRAM"
SERIES = {False: "least recently used", True: "parked by the predicted return"}
MEAN, READ = "mean TTFT, s", "read from SSD, M tokens"


def label(parking: bool, dram: int) -> str:
    return f"{SERIES[parking]}, {dram} blocks"


def cases(requests: int | None) -> list[Case]:
    work = Workload("sessions", min(requests or REQUESTS, REQUESTS))
    each = SimConfig(prefill=4, decode=4, cache_blocks=CACHE, ssd_blocks=SSD, ssd_gbyte_s=GBYTE_S)
    made = [
        Case(
            label(parking, dram),
            replace(each, pool_blocks=dram, session_parking=parking),
            work,
            ttft_slo_s=10.0,
            series=SERIES[parking],
            x=float(dram),
        )
        for parking in (False, True)
        for dram in DRAM
    ]
    return [*made, Case(ALL, replace(each, pool_blocks=SSD, ssd_blocks=0), work, ttft_slo_s=10.0)]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    gains = ", ".join(f"{dram} blocks {relative(values, MEAN, label(True, dram), label(False, dram))}" for dram in DRAM)
    reads = ", ".join(f"{dram} blocks {relative(values, READ, label(True, dram), label(False, dram))}" for dram in DRAM)
    worse = [str(dram) for dram in DRAM if sign(values, MEAN, label(True, dram), label(False, dram)) > 0]
    lru = ", ".join(told(values[label(False, dram)][MEAN], ".3f") for dram in DRAM)
    return (
        f"Parked against least recently used, mean TTFT: {gains}; read from SSD on the way of requests: {reads}. "
        + (f"With {', '.join(worse)} blocks it makes it worse. " if worse else "It is nowhere shown to make it worse. ")
        + f"The limit is {told(values[ALL][MEAN], '.3f')} s with all of it in DRAM, least recently used: {lru} s. Most "
        "of the gain is that blocks of sessions that are away leave first; blocks come up only into room that nothing "
        "else needs, because each that is not read in its window has cost a read and the place of another."
    )


SESSIONS_ABLATION = Ablation(
    "sessions",
    "What does it gain to park the KV of sessions by their predicted return?",
    f"4P+4D, generated sessions: agents that call tools, people, periodic agents; {CACHE} blocks in the memory of each "
    f"node and {SSD} on its SSD of {GBYTE_S:g} GB/s; x = blocks of a node's share of the pool in DRAM.",
    cases,
    metrics(MEAN, "p99 TTFT, s", "hit rate")
    | {
        READ: metric("ssd_tokens", scale=1e-6),
        "brought up, blocks": metric("blocks_raised"),
        "dropped, blocks": metric("blocks_dropped"),
    },
    reading,
    x_name="blocks of a node in DRAM",
)
