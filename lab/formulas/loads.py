"""Loads for a plan: from a trace, with the prefixes that a pool of a given size would find, or from distributions."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from cache.pool.policies import policies
from cache.pool.policy import Facts
from lab.formulas.plan import Load
from lab.loads.trace import BLOCK_TOKENS, TraceRow
from lab.simulator.models.caches import Cache


def load_of(rows: Sequence[TraceRow], rate: float, pool_blocks: int | None = None, hit_rate: float = 0.0) -> Load:
    """`rate` requests/s, 0 = the trace's own. Cached prefixes: those that an LRU pool of pool_blocks finds, or hit_rate
    of every prompt. Raises ValueError."""
    if not 0 <= hit_rate < 1:
        raise ValueError(f"--hit-rate must be at least 0 and below 1, got {hit_rate}")
    if len(rows) < 2:
        raise ValueError("a plan needs a trace of two requests or more")
    prompt = np.array([row.input_length for row in rows], dtype=np.float64)
    answer = np.array([max(1, row.output_length) for row in rows], dtype=np.float64)
    found = np.floor(hit_rate * prompt) if pool_blocks is None else pooled(rows, pool_blocks)
    if not rate:
        seconds = (max(row.timestamp_ms for row in rows) - min(row.timestamp_ms for row in rows)) / 1000
        if not seconds:
            raise ValueError("all requests of the trace arrive at the same time: give --rate")
        rate = len(rows) / seconds
    return Load(rate, prompt, answer, np.minimum(found, prompt - 1))


def pooled(rows: Sequence[TraceRow], blocks: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[requests]: tokens of prefix that a global LRU pool of `blocks` blocks holds when the request arrives."""
    pool, facts = Cache(policies["lru"](), blocks), Facts(0, 1.0)
    found = []
    for row in rows:
        most = (row.input_length - 1) // BLOCK_TOKENS
        found.append(min(pool.run(row.hash_ids), most) * BLOCK_TOKENS)
        full = row.hash_ids[: row.input_length // BLOCK_TOKENS] or row.hash_ids
        pool.use(full, [facts] * len(full))
    return np.array(found, dtype=np.float64)


def drawn(
    seed: int, requests: int, prompt: tuple[float, float], answer: tuple[float, float], rate: float, shared: float = 0.0
) -> list[TraceRow]:
    """Poisson arrivals; prompt and answer lengths are lognormal by (mean, coefficient of variation). A share `shared`
    of the requests takes the first half of its prompt from one of 32 common documents."""
    rng = Random(seed)
    documents = [list(range(i * 10_000, (i + 1) * 10_000)) for i in range(32)]
    rows, at, block = [], 0.0, 1_000_000
    for _ in range(requests):
        at += rng.expovariate(rate)
        tokens, output = lognormal(rng, *prompt), lognormal(rng, *answer)
        blocks = -(-tokens // BLOCK_TOKENS)
        common = min(blocks // 2, 10_000) if rng.random() < shared else 0
        ids = rng.choice(documents)[:common] + list(range(block, block + blocks - common))
        block += blocks
        rows.append(TraceRow(1000 * at, tokens, output, ids))
    return rows


def lognormal(rng: Random, mean: float, variation: float) -> int:
    """A lognormal number, at least 1."""
    square = float(np.log(1 + variation**2))
    return max(1, round(rng.lognormvariate(float(np.log(mean)) - square / 2, square**0.5)))
