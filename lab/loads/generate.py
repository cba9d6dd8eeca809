"""Seeded request traces in Mooncake's format, if the released ones are not available.

Chats: sessions that begin with one of a few popular system prompts; their prompts grow by the last answer and a new
question. Flood: prompts that share no block with others, as an offline job sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random

from lab.loads.trace import BLOCK_TOKENS, TraceRow


def chats(seed: int, requests: int, rate_s: float = 4.0, systems: int = 12, turns: float = 4.0) -> list[TraceRow]:
    """About `rate_s` requests per second of sessions with `turns` turns on average, and a minute of thinking between
    them; the first `requests` of them by time."""
    rng, ids = Random(seed), count()
    prompts = [[next(ids) for _ in range(rng.randint(1, 8))] for _ in range(systems)]
    popularity = [1 / (rank + 1) for rank in range(systems)]
    rows: list[TraceRow] = []
    start = 0.0
    while len(rows) < 2 * requests:
        start += rng.expovariate(rate_s / turns)
        chain = list(rng.choices(prompts, popularity)[0])
        at, tokens = start, len(chain) * BLOCK_TOKENS
        while True:
            tokens += round(rng.lognormvariate(6.5, 1.0)) + 1
            chain += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(chain))]
            output = round(rng.lognormvariate(5.5, 0.6)) + 1
            partial = [next(ids)] if tokens % BLOCK_TOKENS else []
            rows.append(TraceRow(1000 * at, tokens, output, chain + partial))
            if rng.random() < 1 / turns:
                break
            tokens += output
            at += rng.expovariate(1 / 60)
    rows.sort(key=lambda row: row.timestamp_ms)
    return rows[:requests]


def flood(chat: Sequence[TraceRow], seed: int, per_request: float, blocks: int = 24) -> list[TraceRow]:
    """`chat` in the class interactive, with `per_request` batch prompts of about `blocks` blocks after each row. Each
    prompt comes twice at random distances, like retried work, so a cache that keeps it would benefit."""
    rng = Random(seed)
    ids = count(1 + max(max(row.hash_ids) for row in chat))
    rows: list[TraceRow] = []
    waiting: list[list[int]] = []
    debt = 0.0
    for row in chat:
        rows.append(replace(row, service_class="interactive"))
        debt += per_request
        while debt >= 1:
            debt -= 1
            if waiting and rng.random() < 0.5:
                prompt = waiting.pop(rng.randrange(len(waiting)))
            else:
                prompt = [next(ids) for _ in range(rng.randint(1, 2 * blocks))]
                waiting.append(prompt)
            rows.append(TraceRow(row.timestamp_ms, len(prompt) * BLOCK_TOKENS, 64, prompt, "batch"))
    return rows
