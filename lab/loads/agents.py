"""A seeded substitute for the tool&agent trace of FAST'25, if its file is not available.

Agents are a few long prompts (tool descriptions, instructions) of very unequal popularity. A task is a session that
calls its agent repeatedly, with its results so far appended. Fitted to the published summary: 8,590 tokens in, 182 out
on average, 6.67 requests/s, and the hit rates of an LRU pool by size (within .03 from 1,000 blocks upward).
"""

from __future__ import annotations

from itertools import count
from random import Random

from lab.loads.trace import BLOCK_TOKENS, TraceRow

AGENTS = 12
PREFIX_BLOCKS = (4, 9)  # range of an agent's prompt
CALLS = 1.6  # mean calls of a task
RATE_S = 23_608 / 3_540


def agents(seed: int, requests: int, rate_s: float = RATE_S) -> list[TraceRow]:
    """`requests` rows, sorted by time."""
    rng, ids = Random(seed), count()
    prefixes = [[next(ids) for _ in range(rng.randint(*PREFIX_BLOCKS))] for _ in range(AGENTS)]
    popularity = [(rank + 1) ** -1.2 for rank in range(AGENTS)]
    rows: list[TraceRow] = []
    start = 0.0
    while len(rows) < 1.3 * requests:  # the last calls of late tasks are cut off
        start += rng.expovariate(rate_s / CALLS)
        chain = list(rng.choices(prefixes, popularity)[0])
        at, tokens = start, len(chain) * BLOCK_TOKENS
        while True:
            tokens += round(rng.lognormvariate(7.42, 1.2)) + 1
            chain += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(chain))]
            output = round(rng.lognormvariate(4.75, 0.95)) + 1
            rows.append(TraceRow(1000 * at, tokens, output, chain + ([next(ids)] if tokens % BLOCK_TOKENS else [])))
            if rng.random() < 1 / CALLS:
                break
            tokens += output
            at += rng.lognormvariate(4.9, 1.0)
    rows.sort(key=lambda row: row.timestamp_ms)
    return rows[:requests]
