"""A seeded substitute for the conversation trace of FAST'25, if its file is not available.

A chat is one session: each prompt extends the previous one, or only a part of it if the client has rewritten its
history. All begin with the same system prompt. The trace is a window of a running service, so some chats began before
it. Fitted to the released trace: lengths, the number of a chat's prompts and the time between them, the rate; hit rates
by capacity follow (tests/lab/loads/test_generators.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from lab.loads.draws import Quantiles
from lab.loads.trace import BLOCK_TOKENS, TraceRow

RATE_S = 12_031 / 3_537
SYSTEM = 891  # tokens, the shortest prompt
MOST = 126_195  # tokens, the longest
WARM_S = 1800.0  # length of the time before the window in which chats begin

SHORT = 0.25  # share of the chats that begin with a short question
FIRST = {True: (4.1, 1.5), False: (8.87, 1.12)}  # logarithm of a first message's tokens: mean, deviation
GOES_ON = (1.9, 3.5)  # Beta distribution of a chat's probability of another prompt
TURNS = 1.76  # resulting mean turns of a chat: (a + b - 1) / (b - 1)
LONG = 0.2  # share of the further messages that are long
MESSAGE = {True: (8.3, 1.0), False: (6.0, 0.8)}
REWRITTEN = 0.25  # share of the further prompts that keep only a part of the previous one
GAP = (4.88, 0.98)  # logarithm of the seconds between two prompts of a chat: mean, deviation
ANSWER = Quantiles(
    (0, 1), (0.05, 10), (0.1, 24), (0.25, 156), (0.5, 350), (0.75, 472), (0.9, 597), (0.99, 1090), (1, 2000)
)


def conversation(seed: int, requests: int, rate_s: float = RATE_S) -> list[TraceRow]:
    """`requests` rows, sorted by time."""
    rng, ids = Random(seed), count(1)
    rows: list[TraceRow] = []
    start, end = -WARM_S, 1.2 * requests / rate_s
    while start < end:
        start += rng.expovariate(rate_s / TURNS)
        rows += (row for row in _chat(rng, ids, start) if row.timestamp_ms >= 0)
    rows.sort(key=lambda row: row.timestamp_ms)
    return rows[:requests]


def _chat(rng: Random, ids: Iterator[int], at: float) -> Iterator[TraceRow]:
    chain, goes_on = [0], rng.betavariate(*GOES_ON)
    tokens = min(MOST, SYSTEM + round(rng.lognormvariate(*FIRST[rng.random() < SHORT])))
    while tokens <= MOST:
        chain += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(chain))]
        yield TraceRow(1000 * at, tokens, ANSWER.draw(rng), chain + ([next(ids)] if tokens % BLOCK_TOKENS else []))
        if rng.random() > goes_on:
            return
        if rng.random() < REWRITTEN:
            chain = chain[: 1 + int(rng.random() * (len(chain) - 1))]
        tokens += 1 + round(rng.lognormvariate(*MESSAGE[rng.random() < LONG]))
        at += rng.lognormvariate(*GAP)
