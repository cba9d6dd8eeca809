"""Loads that caches do not like: prefixes that are all new, that change at once, that everybody wants."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from scripts.lab.ablation import Ablation, Case, Estimated, Workload, metric, ratio
from sim.config import SimConfig
from sim.trace import TraceRow


def unique(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """No two prompts share anything."""
    block, made = 0, []
    for row in rows:
        made.append(replace(row, hash_ids=list(range(block, block + len(row.hash_ids)))))
        block += len(row.hash_ids)
    return made


def flipped(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """From the middle on every prefix is another one."""
    span, half = 1 + max(max(row.hash_ids) for row in rows), len(rows) // 2
    return [replace(row, hash_ids=[b + span for b in row.hash_ids]) if i >= half else row for i, row in enumerate(rows)]


def viral(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """From the middle on half of the requests begin with one new prefix of 16 blocks."""
    rng, span = Random(seed), 1 + max(max(row.hash_ids) for row in rows)
    shared = list(range(span, span + 16))
    return [
        replace(row, hash_ids=shared + row.hash_ids, input_length=row.input_length + 16 * 512)
        if i >= len(rows) // 2 and rng.random() < 0.5
        else row
        for i, row in enumerate(rows)
    ]


LOADS = {"as recorded": None, "all unique": unique, "prefix flip": flipped, "viral prefix": viral}


def cases(requests: int | None) -> list[Case]:
    made = []
    for name, change in LOADS.items():
        work = Workload("conversation", min(requests or 4000, 4000), change=change)
        made.append(Case(name, SimConfig(pool_blocks=6000), work))
        made.append(Case(f"{name}, cache off", SimConfig(cache_blocks=0), work))
    return made


def spread(result: dict[str, object]) -> float:
    """The busiest prefill node over their mean."""
    shares = result["busy"]
    assert isinstance(shares, dict)
    busy = [value for name, value in shares.items() if name.startswith("prefill")]
    return float(max(busy) * len(busy) / sum(busy))


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    cost = ratio(values, "mean TTFT, s", "all unique", "all unique, cache off") - 1
    viral_load = values["viral prefix"]["busiest / mean prefill node"].mean
    return (
        f"Unique prefixes cost {cost:+.1%} of TTFT (goal 2 %); under a viral prefix the busiest node has "
        f"{viral_load:.2f}x the mean load (goal 1.5)."
    )


SHIFTS = Ablation(
    "shifts",
    "What do loads cost that caches do not like?",
    "8P+8D, conversation trace with its prefixes changed; cache off = nothing is kept anywhere.",
    cases,
    {
        "mean TTFT, s": metric("ttft_s", "mean"),
        "hit rate": metric("token_hit_rate"),
        "busiest / mean prefill node": spread,
    },
    reading,
)
