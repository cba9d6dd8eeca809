"""Two sites that read the same documents, one of which gets more requests than it can serve alone.

Poisson arrivals. Each request is a document, drawn by Zipf from those that both sites read, and a question of its own.
So a request that the busy site passes on has its prefix in the pool of that site.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from random import Random

from lab.loads.trace import TraceRow

OTHER, BUSY = 0, 1
"""Places of the sites in TraceRow.site."""

QUESTION_TOKENS = (16, 64)
ZIPF = 1.0


@dataclass(frozen=True, slots=True)
class BusySite:
    """`rate_s`: requests/s of both sites together; `busy_share`: the part of them that arrives at the busy one;
    `block_tokens`: of a block of the rows. Documents are of whole blocks."""

    requests: int = 120
    rate_s: float = 2.0
    busy_share: float = 0.75
    documents: int = 32
    document_tokens: int = 768
    answer_tokens: int = 8
    block_tokens: int = 64

    def rows(self, seed: int) -> list[TraceRow]:
        """Sorted by time, the first one at 0."""
        rng, fresh = Random(f"busy site {seed}"), count(1_000_000)
        blocks = max(1, self.document_tokens // self.block_tokens)
        weights = [(rank + 1) ** -ZIPF for rank in range(self.documents)]
        rows: list[TraceRow] = []
        now = 0.0
        for _ in range(self.requests):
            first = 1000 * rng.choices(range(self.documents), weights)[0]
            place = BUSY if rng.random() < self.busy_share else OTHER
            tokens = blocks * self.block_tokens + rng.randint(*QUESTION_TOKENS)
            chain = [*range(first, first + blocks)]
            chain += [next(fresh) for _ in range(-(-tokens // self.block_tokens) - blocks)]
            rows.append(TraceRow(1000 * now, tokens, self.answer_tokens, chain, site=place))
            now += rng.expovariate(self.rate_s)
        return rows
