"""One step of the engine: which tokens of which requests it computes, and what it changed. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.block import BlockKey
from cache.pool.policy import Facts
from engine.step.request import Request


@dataclass(slots=True)
class ScheduledRow:
    """`num_tokens` tokens of `request`, from position `start` on, are computed in this step.

    With speculation, `num_drafts` of them follow the last known token; they are in `draft` once somebody has guessed
    them, and a guess that falls short makes the row shorter."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the last known token is among them, so the step yields the next one
    num_drafts: int = 0
    draft: list[int] = field(default_factory=list)

    def set_draft(self, draft: list[int]) -> None:
        self.num_tokens += len(draft) - self.num_drafts
        self.num_drafts, self.draft = len(draft), draft


@dataclass(slots=True)
class Step:
    rows: list[ScheduledRow]  # decodes (one token) first

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class Committed:
    """What a finished step changed."""

    emitted: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, index into the step's rows, how many of that row's sampled tokens were kept: at least one)."""

    named: list[tuple[BlockKey, int, Facts]] = field(default_factory=list)  # blocks that became full: (key, id, facts)
