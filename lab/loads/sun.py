"""Several sites that follow the sun: the rate of each is a daily wave, and each is shifted by its part of a day.

    rate of site s at time t = mean * (1 + depth * cos(2 pi (t / day - s / sites)))

A request is a document and a question. A share `common` of the requests asks about documents that all sites read, the
others about documents of their own site. Both kinds are equally many at each site, and of equal popularity (Zipf), so
`common` changes whose documents are read and not how often. Documents pass: every `life_s` / documents seconds a new
one replaces the oldest, so that no cache ever has all that will be asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from lab.loads.trace import BLOCK_TOKENS, TraceRow

DOCUMENT_BLOCKS = (12, 28)
QUESTION_TOKENS = (64, 1024)
ANSWER_TOKENS = 128
ZIPF = 1.0


@dataclass(frozen=True, slots=True)
class Sun:
    """`rate_s`: mean requests/s of all sites together; `documents`: of each kind at one time."""

    sites: int = 3
    common: float = 0.5
    rate_s: float = 6.0
    day_s: float = 1200.0
    depth: float = 0.9
    documents: int = 60
    life_s: float = 600.0


def sun(seed: int, requests: int, load: Sun = Sun()) -> list[TraceRow]:
    """`requests` rows, sorted by time."""
    rng, ids = Random(f"sun {seed}"), count()
    shelves = [_Shelf(rng, ids, load) for _ in range(load.sites + 1)]  # the last one is common
    weights = [(rank + 1) ** -ZIPF for rank in range(load.documents)]
    rows: list[TraceRow] = []
    now, most = 0.0, load.rate_s * (1 + load.depth)
    while len(rows) < requests:
        now += rng.expovariate(most)
        place = rng.randrange(load.sites)
        wave = 1 + load.depth * math.cos(2 * math.pi * (now / load.day_s - place / load.sites))
        if rng.random() * (1 + load.depth) >= wave:  # thinning: a Poisson process of a varying rate
            continue
        shelf = shelves[-1 if rng.random() < load.common else place]
        document = shelf.at(now)[rng.choices(range(load.documents), weights)[0]]
        tokens = len(document) * BLOCK_TOKENS + rng.randint(*QUESTION_TOKENS)
        chain = document + [next(ids) for _ in range(-(-tokens // BLOCK_TOKENS) - len(document))]
        output = round(rng.expovariate(1 / ANSWER_TOKENS)) + 1
        rows.append(TraceRow(1000 * now, tokens, output, chain, site=place))
    return rows


class _Shelf:
    """Documents that pass. The popularity of a place stays: who replaces a popular document is popular."""

    def __init__(self, rng: Random, ids: Iterator[int], load: Sun) -> None:
        self._rng, self._ids = rng, ids
        self._every_s = load.life_s / load.documents
        self._documents = [self._new() for _ in range(load.documents)]
        self._order = list(range(load.documents))
        rng.shuffle(self._order)
        self._replaced = 0

    def at(self, now: float) -> list[list[int]]:
        """The documents at this time, which does not go back."""
        while (self._replaced + 1) * self._every_s <= now:
            self._documents[self._order[self._replaced % len(self._order)]] = self._new()
            self._replaced += 1
        return self._documents

    def _new(self) -> list[int]:
        return [next(self._ids) for _ in range(self._rng.randint(*DOCUMENT_BLOCKS))]
