"""Replays one trace through one cache that is cold at the start. It uses the eviction and admission classes of
cache/, as on a single node with a global cache.

A request's hits are the leading run of its blocks that are cached (prefix hits). Then its blocks are touched or
inserted from the last to the first, so that among equals a prompt's end is evicted before its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from cache.pool.admission import Admission
from cache.pool.policy import EvictionPolicy, Facts
from lab.loads.trace import BLOCK_TOKENS, TraceRow

CONTEXT_FLOPS = 4 / (22 * 8192)
"""FAST'25 equation 1 with its LLaMA3-70B values: a token at position n costs 1 + 2 n a / (b d) times one at 0."""


@dataclass(slots=True)
class Hits:
    """The hits of one service class, or of all."""

    requests: int = 0
    blocks: int = 0
    block_hits: int = 0
    tokens: int = 0
    token_hits: int = 0
    work: float = 0.0  # prefill, in tokens at position 0
    work_saved: float = 0.0

    @property
    def block_rate(self) -> float:
        return self.block_hits / max(1, self.blocks)

    @property
    def token_rate(self) -> float:
        return self.token_hits / max(1, self.tokens)

    @property
    def work_rate(self) -> float:
        return self.work_saved / max(1.0, self.work)

    def count(self, row: TraceRow, run: int) -> None:
        """`run`: number of leading blocks of the row that were found."""
        reused = min(run * BLOCK_TOKENS, row.input_length)
        self.requests += 1
        self.blocks += len(row.hash_ids)
        self.block_hits += run
        self.tokens += row.input_length
        self.token_hits += reused
        self.work += prefill_work(row.input_length)
        self.work_saved += prefill_work(reused)


@dataclass(slots=True)
class Outcome:
    total: Hits = field(default_factory=Hits)
    by_class: dict[str, Hits] = field(default_factory=dict)
    inserted: int = 0
    evicted: int = 0
    refused: int = 0  # blocks refused by admission


def prefill_work(num_tokens: int) -> float:
    """The work of a prompt's first `num_tokens` tokens, in tokens at position 0."""
    return num_tokens + CONTEXT_FLOPS * num_tokens**2


class FactsTable:
    """Facts by position and class, made once."""

    def __init__(self) -> None:
        self._facts: dict[str, list[Facts]] = {}

    def of(self, service_class: str, count: int) -> list[Facts]:
        """Facts of at least the first `count` positions."""
        table = self._facts.setdefault(service_class, [])
        for position in range(len(table), count):
            start, end = position * BLOCK_TOKENS, (position + 1) * BLOCK_TOKENS
            table.append(Facts(position, prefill_work(end) - prefill_work(start), service_class))
        return table


def replay(
    rows: Sequence[TraceRow],
    capacity: int | None,
    policy: EvictionPolicy,
    admission: Admission | None = None,
) -> Outcome:
    """capacity: blocks, None = no limit."""
    here: set[int] = set()
    facts, outcome = FactsTable(), Outcome()
    for row in rows:
        service_class = row.service_class
        run = next((i for i, block in enumerate(row.hash_ids) if block not in here), len(row.hash_ids))
        outcome.total.count(row, run)
        outcome.by_class.setdefault(service_class, Hits()).count(row, run)
        table = facts.of(service_class, len(row.hash_ids))
        for position in range(len(row.hash_ids) - 1, -1, -1):
            block = row.hash_ids[position]
            if admission is not None:
                admission.wanted(block)
            if block in here:
                policy.touched(block)
                continue
            if len(here) == capacity:
                victim = policy.victim()
                if admission is not None and not admission.admits(block, table[position], victim):
                    outcome.refused += 1
                    continue
                policy.removed(victim)
                here.remove(cast(int, victim))
                outcome.evicted += 1
            policy.added(block, table[position])
            here.add(block)
            outcome.inserted += 1
    return outcome
