"""One step of the engine: the tokens that it computes, and the changes that it made. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.block import BlockKey
from cache.pool.policy import Facts
from engine.step.request import Request


@dataclass(slots=True)
class ScheduledRow:
    """A part of a step: `num_tokens` tokens of `request`, from position `start`.

    With speculation, `num_drafts` of them follow the last known token. `set_draft` fills them in; a draft with fewer
    tokens makes the row shorter. The first `again` of them have KV, but the request's states lack them."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the row includes the last known token, so the step samples the next one
    num_drafts: int = 0
    draft: list[int] = field(default_factory=list)
    again: int = 0
    layers: range | None = None  # if the request is `apart`: those that the tokens pass in this step
    spent_s: float = 0.0  # on these tokens, in steps that passed the layers before

    @property
    def decodes(self) -> bool:
        """Whether it computes one known token for the first time, with or without a draft behind it."""
        return self.num_tokens - self.num_drafts - self.again == 1 and self.request.part is None

    @property
    def ends(self) -> bool:
        """Whether its tokens are computed after this step: they pass the last layer that this node computes."""
        apart = self.request.apart
        return apart is None or self.layers is None or self.layers.stop == apart.span.stop

    @property
    def share(self) -> float:
        """Of the model's layers, that its tokens pass in this step."""
        apart = self.request.apart
        return self.request.share if apart is None or self.layers is None else len(self.layers) / apart.model_layers

    @property
    def work_tokens(self) -> float:
        """`num_tokens`, fewer if they pass only some of the layers."""
        return self.num_tokens * self.share

    def stay(self, layer: int) -> None:
        """The step has ended before its tokens have passed `layer`, one of `layers`, and those behind it."""
        assert self.layers is not None
        self.layers, self.samples = range(self.layers.start, layer), False

    def set_draft(self, draft: list[int]) -> None:
        self.num_tokens += len(draft) - self.num_drafts
        self.num_drafts, self.draft = len(draft), draft


@dataclass(slots=True)
class Step:
    rows: list[ScheduledRow]  # decodes (one token) first
    gives_way: bool = False  # it may end without a result behind any layer, and is computed again (sched/part_turns.py)
    left_out: Sequence[Request] = ()  # of class batch, that wait for its rows of higher classes

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def other_prompts(self) -> list[float]:
        """For each row the share of other prompts in the prompt tokens of this step; 0 for a decode."""
        prompts = sum(row.work_tokens for row in self.rows if not row.decodes)
        return [0.0 if row.decodes or not prompts else 1.0 - row.work_tokens / prompts for row in self.rows]

    @property
    def has_parts(self) -> bool:
        """Whether a row is the part that this node computes of a long prompt: some of its layers, or of its tokens."""
        return any(row.request.part is not None for row in self.rows)

    @property
    def may_end(self) -> bool:
        """Whether it may have to end before all its rows have passed their layers, because others come."""
        return self.gives_way or self.has_parts

    @property
    def has_cold(self) -> bool:
        """Whether the KV of a row exceeds the arena."""
        return any(row.request.cold is not None for row in self.rows)


Named = tuple[BlockKey, int, Facts]
"""A full block: (key, block id, facts)."""


@dataclass(slots=True)
class Committed:
    """The changes made by a finished step."""

    emitted: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, index into the step's rows, number of sampled tokens kept from that row, at least one)."""

    named: list[Named] = field(default_factory=list)  # blocks that became full
    passed: list[int] = field(default_factory=list)  # indices of rows whose hidden states go to the next stage
