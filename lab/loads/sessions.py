"""Agents and people in sessions, each with a habit: the gap between an answer and the next turn.

    tools     an agent that calls tools, between TOOL_S, and takes many turns
    people    between PERSON_S, and widely spread around it
    periodic  an agent that looks again at the same times, between PERIOD_S, such as a monitor

A session begins with one of a few system prompts, of very unequal popularity, and grows by each turn. A trace does not
know when an answer ends: here a turn takes PROMPT_S and TOKEN_S per token of the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from random import Random

from lab.loads.trace import BLOCK_TOKENS, TraceRow

SYSTEMS, SYSTEM_BLOCKS = 8, (2, 6)
FIRST_TOKENS = (1024, 10_000)
TURN_TOKENS = (64, 1500)
ANSWER_TOKENS = 180
PROMPT_S, TOKEN_S = 0.5, 0.04


@dataclass(frozen=True, slots=True)
class Kind:
    """Sessions of one kind: a `share` of all; the median gap of each is between `gap_s`, on a logarithmic scale, and
    the logarithms of its gaps spread by `spread`; `turns`: mean."""

    share: float
    gap_s: tuple[float, float]
    spread: float
    turns: float


TOOLS = Kind(0.4, (1.0, 6.0), 0.5, 8.0)
PEOPLE = Kind(0.3, (20.0, 120.0), 0.8, 4.0)
PERIODIC = Kind(0.3, (60.0, 240.0), 0.04, 8.0)
KINDS = TOOLS, PEOPLE, PERIODIC


def sessions(seed: int, requests: int, rate_s: float = 4.0, kinds: tuple[Kind, ...] = KINDS) -> list[TraceRow]:
    """`requests` rows, sorted by time, of sessions whose turns together come at `rate_s` in the long run."""
    rng, ids = Random(f"sessions {seed}"), count()
    systems = [[next(ids) for _ in range(rng.randint(*SYSTEM_BLOCKS))] for _ in range(SYSTEMS)]
    popularity = [1 / (rank + 1) for rank in range(SYSTEMS)]
    turns = sum(kind.share * kind.turns for kind in kinds) / sum(kind.share for kind in kinds)
    rows: list[TraceRow] = []
    start = 0.0
    for session in count():
        start += rng.expovariate(rate_s / turns)
        if len(rows) > 4 * requests and sorted(row.timestamp_ms for row in rows)[requests - 1] < 1000 * start:
            break
        kind = rng.choices(kinds, [kind.share for kind in kinds])[0]
        median = math.exp(rng.uniform(*(math.log(gap_s) for gap_s in kind.gap_s)))
        chain, at = list(rng.choices(systems, popularity)[0]), start
        tokens = len(chain) * BLOCK_TOKENS + rng.randint(*FIRST_TOKENS)
        while True:
            chain += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(chain))]
            output = round(rng.expovariate(1 / ANSWER_TOKENS)) + 1
            blocks = chain + ([next(ids)] if tokens % BLOCK_TOKENS else [])
            rows.append(TraceRow(1000 * at, tokens, output, blocks, session=session))
            if rng.random() < 1 / kind.turns:
                break
            tokens += output + rng.randint(*TURN_TOKENS)
            at += PROMPT_S + TOKEN_S * output + rng.lognormvariate(math.log(median), kind.spread)
    rows.sort(key=lambda row: row.timestamp_ms)
    return rows[:requests]
