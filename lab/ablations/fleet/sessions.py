"""Parked or least recently used: the KV of agents and people between their turns, by the DRAM of the pool."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative, shown, sign, told, weighted
from lab.ablations.common.metrics import metric, metrics
from lab.simulator.config import SimConfig

REQUESTS = 4000
CACHE, SSD, GBYTE_S = 60, 4000, 2.0
"""Blocks that a node's arena keeps, and those of its SSD, and the bandwidth of that."""
DRAM = (60, 120, 200)
"""Blocks of a node's share of the pool in DRAM."""
ALL = "all of it in DRAM"
LRU, ORDER, PARKED = "least recently used", "parked, never brought up", "parked by the predicted return"
SERIES = {LRU: (False, True), ORDER: (True, False), PARKED: (True, True)}
"""Series -> (session_parking, session_raising)."""

MEAN, READ = "mean TTFT, s", "read from SSD, M tokens"


def label(series: str, dram: int) -> str:
    return f"{series}, {dram} blocks"


def cases(requests: int | None) -> list[Case]:
    work = Workload("sessions", min(requests or REQUESTS, REQUESTS))
    each = SimConfig(prefill=4, decode=4, cache_blocks=CACHE, ssd_blocks=SSD, ssd_gbyte_s=GBYTE_S)
    made = [
        Case(
            label(series, dram),
            replace(each, pool_blocks=dram, session_parking=parking, session_raising=raising),
            work,
            ttft_slo_s=10.0,
            series=series,
            x=float(dram),
        )
        for series, (parking, raising) in SERIES.items()
        for dram in DRAM
    ]
    return [*made, Case(ALL, replace(each, pool_blocks=SSD, ssd_blocks=0), work, ttft_slo_s=10.0)]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    def changes(metric: str, series: str, baseline: str) -> str:
        each = (
            f"{dram} blocks {relative(values, metric, label(series, dram), label(baseline, dram))}" for dram in DRAM
        )
        return ", ".join(each)

    worse = [str(dram) for dram in DRAM if sign(values, MEAN, label(PARKED, dram), label(LRU, dram)) > 0]
    lru = ", ".join(told(values[label(LRU, dram)][MEAN], ".3f") for dram in DRAM)
    return (
        f"Parked against least recently used, mean TTFT: {changes(MEAN, PARKED, LRU)}; read from SSD on the way of "
        f"requests: {changes(READ, PARKED, LRU)}. "
        + (f"With {', '.join(worse)} blocks it makes it worse. " if worse else "It is nowhere shown to make it worse. ")
        + f"The limit is {told(values[ALL][MEAN], '.3f')} s with all of it in DRAM, least recently used: {lru} s. If "
        f"blocks only leave in another order and never come up, mean TTFT is: {changes(MEAN, ORDER, LRU)}; bringing "
        f"them up changes that by: {changes(MEAN, PARKED, ORDER)}. {shares_of_gain(values)}"
    )


def shares_of_gain(values: dict[str, dict[str, Estimated]]) -> str:
    """How much of the gain of parking is the order in which blocks leave, where the intervals tell it."""
    found: dict[str, list[str]] = {"more": [], "less": []}
    for dram in DRAM:
        lru, order, parked = (values[label(series, dram)][MEAN] for series in (LRU, ORDER, PARKED))
        beyond_half = shown(weighted((0.5, lru), (-1.0, order), (0.5, parked)))
        if sign(values, MEAN, label(PARKED, dram), label(LRU, dram)) < 0 and beyond_half:
            found["more" if beyond_half > 0 else "less"].append(str(dram))
    said = [
        f"With {', '.join(drams)} blocks {share} than half of the gain is the order in which blocks leave."
        for share, drams in found.items()
        if drams
    ]
    return " ".join(said) or "It is not shown how much of a gain is the order in which blocks leave."


SESSIONS_ABLATION = Ablation(
    "sessions",
    "What does it gain to park the KV of sessions by their predicted return?",
    f"4P+4D, generated sessions: agents that call tools, people, periodic agents; {CACHE} blocks kept in the arena of "
    f"each node, {SSD} on its SSD of {GBYTE_S:g} GB/s; x = blocks of a node's share of the pool in DRAM. Never brought "
    "up: blocks leave DRAM in the order of the predicted returns, and only requests read the SSD.",
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
