"""Seeded changes of a trace: its prefixes, lengths, arrivals or classes; the rest stays.

Each change takes (rows, seed) and returns rows sorted by time; a function with parameters makes a change with these
parameters. New block ids are larger than all ids of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from lab.loads.trace import BLOCK_TOKENS, TraceRow

Change = Callable[[list[TraceRow], int], list[TraceRow]]


def above(rows: Sequence[TraceRow]) -> int:
    """The smallest block id above those of all rows."""
    return 1 + max((max(row.hash_ids) for row in rows), default=-1)


def unique(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """No two prompts share a block."""
    ids = count()
    return [replace(row, hash_ids=[next(ids) for _ in row.hash_ids]) for row in rows]


def flipped(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """From the middle on all prefixes are replaced by others."""
    span, half = above(rows), len(rows) // 2
    return [replace(row, hash_ids=[b + span for b in row.hash_ids]) if i >= half else row for i, row in enumerate(rows)]


def viral(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """From the middle on half of the requests begin with one new prefix of 16 blocks."""
    rng, span = Random(seed), above(rows)
    shared = list(range(span, span + 16))
    return [
        replace(
            row,
            hash_ids=[*shared, *(b + span + 16 for b in row.hash_ids)],
            input_length=row.input_length + 16 * BLOCK_TOKENS,
        )
        if i >= len(rows) // 2 and rng.random() < 0.5
        else row
        for i, row in enumerate(rows)
    ]


def one_token(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """Answers of one token: only prefill is left, as in FAST'25's Figures 8 and 10."""
    return [replace(row, output_length=1) for row in rows]


class Alike:
    """Prompts of `tokens` tokens without shared blocks, answers of `answer` tokens, Poisson arrivals at `rate_s`. A
    class, so that processes can send it to each other."""

    def __init__(self, tokens: int, answer: int, rate_s: float) -> None:
        self.tokens, self.answer, self.rate_s = tokens, answer, rate_s

    def __call__(self, rows: list[TraceRow], seed: int) -> list[TraceRow]:
        rng, ids, at, made = Random(seed), count(), 0.0, []
        for _ in rows:
            at += rng.expovariate(self.rate_s)
            blocks = [next(ids) for _ in range(-(-self.tokens // BLOCK_TOKENS))]
            made.append(TraceRow(1000 * at, self.tokens, self.answer, blocks))
        return made


def bursty(burst: float = 5.0, share: float = 0.1, mean_s: float = 5.0) -> Change:
    """The same requests in the same order at the same mean rate, in bursts: a Poisson process whose rate is `burst`
    times the mean for a `share` of the time, in bursts of `mean_s` on average, and less between them (MMPP-2)."""
    if not 0 < share < 1 or not 1 < burst < 1 / share:
        raise ValueError(f"bursts of {burst} times the mean rate cannot take a share of {share} of the time")
    calm = (1 - share * burst) / (1 - share)
    lasts = (mean_s * (1 - share) / share, mean_s)

    def change(rows: list[TraceRow], seed: int) -> list[TraceRow]:
        rng = Random(seed)
        begin, end = (edge(row.timestamp_ms for row in rows) / 1000 for edge in (min, max))
        mean = (len(rows) - 1) / (end - begin)
        at, moved, bursting = begin, [], rng.random() < share
        until = at + rng.expovariate(1 / lasts[bursting])
        for row in rows:
            wanted = rng.expovariate(1.0)  # value of the integral of the rate
            while (left := (until - at) * (rate := mean * (burst if bursting else calm))) < wanted:
                wanted, at, bursting = wanted - left, until, not bursting
                until = at + rng.expovariate(1 / lasts[bursting])
            at += wanted / rate
            moved.append(replace(row, timestamp_ms=1000 * at))
        return moved

    return change


class Filled:
    """The trace with class `of`, plus batch prompts: Poisson, `per_s` per second of the trace, lognormal around
    `tokens`, without shared blocks. A class, so that processes can send it to each other."""

    def __init__(self, per_s: float, tokens: float = 8000.0, of: str = "interactive") -> None:
        self.per_s, self.tokens, self.of = per_s, tokens, of

    def __call__(self, rows: list[TraceRow], seed: int) -> list[TraceRow]:
        rng, ids = Random(seed), count(above(rows))
        made = [replace(row, service_class=self.of) for row in rows]
        at, end = (edge(row.timestamp_ms for row in rows) / 1000 for edge in (min, max))
        while self.per_s and (at := at + rng.expovariate(self.per_s)) < end:
            tokens = min(65_536, max(64, round(self.tokens * rng.lognormvariate(-0.32, 0.8))))  # the factor has mean 1
            blocks = [next(ids) for _ in range(-(-tokens // BLOCK_TOKENS))]
            made.append(TraceRow(1000 * at, tokens, 100, blocks, "batch"))
        return sorted(made, key=lambda row: row.timestamp_ms)


class Alternating:
    """Alternating phases of `seconds`: prompts `prompts` times as long, so that prefill is the scarce stage, then
    answers `answers` times as long, so that decode is."""

    def __init__(self, seconds: float, prompts: float, answers: float) -> None:
        self.seconds, self.prompts, self.answers = seconds, prompts, answers

    def __call__(self, rows: list[TraceRow], seed: int) -> list[TraceRow]:
        ids, made = count(above(rows)), []
        for row in rows:
            if int(row.timestamp_ms / 1000 / self.seconds) % 2:
                made.append(replace(row, output_length=round(row.output_length * self.answers)))
                continue
            tokens = round(row.input_length * self.prompts)
            more = -(-tokens // BLOCK_TOKENS) - len(row.hash_ids)
            made.append(replace(row, input_length=tokens, hash_ids=[*row.hash_ids, *(next(ids) for _ in range(more))]))
        return made


def merged(*parts: Sequence[TraceRow]) -> list[TraceRow]:
    """Several traces at the same time; they share no block."""
    together: list[TraceRow] = []
    for part in parts:
        span = above(together)
        together += [replace(row, hash_ids=[b + span for b in row.hash_ids]) for row in part]
    return sorted(together, key=lambda row: row.timestamp_ms)
