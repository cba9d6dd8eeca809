"""Seeded loads with one property each. Popular prefixes that change, a prefix that goes viral, lengths without a
mean, three classes together."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, count
from random import Random

from lab.loads.agents import agents
from lab.loads.changes import merged
from lab.loads.generate import chats
from lab.loads.trace import BLOCK_TOKENS, TraceRow


def popular(
    seed: int, requests: int, rate_s: float = 20.0, prefixes: int = 100, blocks: int = 16, skew: float = 1.1
) -> list[TraceRow]:
    """Every prompt begins with one of `prefixes` whose popularity is Zipf's with exponent `skew`, and ends with its own
    question of some hundred tokens. In the middle of the trace all prefixes are replaced by others."""
    rng, ids = Random(seed), count()
    weights = list(accumulate((rank + 1) ** -skew for rank in range(prefixes)))
    rows, at = [], 0.0
    for number in range(requests):
        if number in (0, requests // 2):
            known = [[next(ids) for _ in range(blocks)] for _ in range(prefixes)]
        at += rng.expovariate(rate_s)
        rows.append(_asked(rng, ids, at, rng.choices(known, cum_weights=weights)[0]))
    return rows


def goes_viral(seed: int, requests: int, rate_s: float = 25.0, share: float = 0.8, blocks: int = 16) -> list[TraceRow]:
    """Prompts of about 1,500 tokens without shared blocks; from the middle on, a `share` of them begins with the same
    prefix of `blocks` blocks."""
    rng, ids = Random(seed), count()
    shared, rows, at = [next(ids) for _ in range(blocks)], [], 0.0
    for number in range(requests):
        at += rng.expovariate(rate_s)
        hit = number >= requests // 2 and rng.random() < share
        rows.append(_asked(rng, ids, at, shared if hit else [], (7.2, 0.4)))
    return rows


def pareto(
    seed: int, requests: int, alpha: float = 1.2, rate_s: float = 4.0, least: int = 1024, most: int = 131_072
) -> list[TraceRow]:
    """Prompts and answers with Pareto lengths: P(more than x) = (least / x)^alpha, prompts up to `most`, answers from
    48 to 2,000 tokens. They share only the first block."""
    rng, ids = Random(seed), count(1)
    rows, at = [], 0.0
    for _ in range(requests):
        at += rng.expovariate(rate_s)
        tokens, answer = _pareto(rng, alpha, least, most), _pareto(rng, alpha, 48, 2000)
        rows.append(
            TraceRow(1000 * at, tokens, answer, [0, *(next(ids) for _ in range(-(-tokens // BLOCK_TOKENS) - 1))])
        )
    return rows


def mixed(seed: int, requests: int) -> list[TraceRow]:
    """Half of the requests are interactive chats, a third are agents' calls of class standard, the rest are batch: long
    documents without shared blocks. Together they are 8 requests per second."""
    total = 8.0
    parts = {"interactive": requests // 2, "standard": requests // 3}
    parts["batch"] = requests - sum(parts.values())
    rate = {name: total * size / requests for name, size in parts.items()}
    rng, ids = Random(seed), count()
    documents, at = [], 0.0
    for _ in range(parts["batch"]):
        at += rng.expovariate(rate["batch"])
        documents.append(_asked(rng, ids, at, [next(ids) for _ in range(rng.randint(8, 40))]))
    made = {
        "interactive": chats(seed, parts["interactive"], rate["interactive"]),
        "standard": agents(seed, parts["standard"], rate["standard"]),
        "batch": documents,
    }
    return merged(*([replace(row, service_class=name) for row in rows] for name, rows in made.items()))


QUESTION = (5.0, 0.7)  # logarithm of its tokens: mean, deviation


def _asked(
    rng: Random, ids: count[int], at: float, prefix: list[int], question: tuple[float, float] = QUESTION
) -> TraceRow:
    """A row with `prefix` and a question after it."""
    tokens = len(prefix) * BLOCK_TOKENS + 1 + round(rng.lognormvariate(*question))
    own = [next(ids) for _ in range(-(-tokens // BLOCK_TOKENS) - len(prefix))]
    return TraceRow(1000 * at, tokens, 1 + round(rng.lognormvariate(4.0, 0.6)), [*prefix, *own])


def _pareto(rng: Random, alpha: float, least: int, most: int) -> int:
    """Redraws values above `most`, which avoids many equal lengths at the end."""
    while (drawn := least * rng.paretovariate(alpha)) > most:
        pass
    return int(drawn)
