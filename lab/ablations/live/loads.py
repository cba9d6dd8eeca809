"""Requests for nodes of this machine, as rows of a trace: the simulator takes the same rows.

Open loop, Poisson. A block has 64 tokens, four blocks of a node: prompts share whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from lab.bench.common.workload import BLOCK, Spec, TokenSource
from lab.formulas.loads import lognormal
from lab.loads.trace import BLOCK_TOKENS, TraceRow

LIVE_BLOCK = 64
VOCABULARY = 32_000
LEAST_PROMPT = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Lognormal lengths by (mean, coefficient of variation) in tokens. A share `shared` of the requests has the first
    half of its prompt from one of `documents` texts."""

    prompt: tuple[float, float] = (500.0, 0.8)
    answer: tuple[float, float] = (32.0, 0.5)
    shared: float = 0.5
    documents: int = 8
    most: int = 3000  # maximum tokens of a prompt
    rate: float = 1.0  # requests per second


def requests(shape: Shape, seed: int, seconds: float) -> list[TraceRow]:
    """Sorted by time. Raises ValueError if the rate gives no request."""
    rng, fresh = Random(seed), count(1_000_000)
    rows: list[TraceRow] = []
    at = rng.expovariate(shape.rate) if shape.rate > 0 else seconds
    while at < seconds:
        tokens = min(shape.most, max(LEAST_PROMPT, lognormal(rng, *shape.prompt)))
        answer = lognormal(rng, *shape.answer)
        blocks = -(-tokens // LIVE_BLOCK)
        common = blocks // 2 if rng.random() < shape.shared else 0
        first = 1000 * rng.randrange(shape.documents)
        ids = [*range(first, first + common), *(next(fresh) for _ in range(blocks - common))]
        rows.append(TraceRow(1000 * at, tokens, answer, ids))
        at += rng.expovariate(shape.rate)
    if not rows:
        raise ValueError(
            f"no request arrives within {seconds:g} s at {shape.rate:g} requests/s: raise --seconds or --rate"
        )
    return rows


def scaled(rows: Iterable[TraceRow], rate: float, seconds: float, most: int = 3000) -> list[TraceRow]:
    """A recorded trace for a small model: an eighth of its lengths, so that its blocks have 64 tokens; the same order
    and relative spacing at `rate` requests per second, cut after `seconds`."""
    rows = sorted(rows, key=lambda row: row.timestamp_ms)
    span = (rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1000 if len(rows) > 1 else 0.0
    if not span or not rate > 0:
        raise ValueError("a trace of two requests or more at different times and a positive --rate are needed")
    speed = rate * span / len(rows)
    part = LIVE_BLOCK / BLOCK_TOKENS
    made = []
    for row in rows:
        at = (row.timestamp_ms - rows[0].timestamp_ms) / speed
        if at < 1000 * seconds:
            tokens = min(most, max(1, round(row.input_length * part)))
            ids = row.hash_ids[: -(-tokens // LIVE_BLOCK)]
            made.append(TraceRow(at, tokens, max(1, round(row.output_length * part)), ids))
    return made


def in_blocks(rows: Iterable[TraceRow], tokens: int) -> list[TraceRow]:
    """The same requests with the blocks of nodes, of which LIVE_BLOCK is a multiple: each of theirs has as many of
    these as it has tokens for. Raises ValueError."""
    if not 0 < tokens <= LIVE_BLOCK or LIVE_BLOCK % tokens:
        raise ValueError(f"nodes have blocks of {tokens} tokens, of which the {LIVE_BLOCK} of a row's are no multiple")
    each = LIVE_BLOCK // tokens
    return [
        replace(
            row,
            hash_ids=[each * block + part for block in row.hash_ids for part in range(each)][
                : -(-row.input_length // tokens)
            ],
        )
        for row in rows
    ]


def specs(rows: Sequence[TraceRow], seed: int) -> list[Spec]:
    """Prompts as token ids: equal blocks have equal tokens; another seed changes all tokens."""
    source = TokenSource(seed, VOCABULARY)
    made = []
    for row in rows:
        tokens = [token for block in row.hash_ids for token in source.tokens(LIVE_BLOCK, BLOCK, block)]
        made.append(Spec(tokens[: row.input_length], row.output_length, row.timestamp_ms / 1000))
    return made
