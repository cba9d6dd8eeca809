"""A decision with all its inputs, for `explain` and for a later comparison with the measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sched.placement.costs import Row
from sched.placement.demand import Demand
from sched.placement.groups.group import Group
from sched.placement.links import Vector
from sched.placement.view import View

MAX_ROWS = 16
"""Candidates per stage that an explanation lists."""


class Stage(Protocol):
    """The inputs of a decision or of one of its stages (costs.py, few.py)."""

    @property
    def view(self) -> View: ...

    def rows(self, most: int) -> list[Row]:
        """The rows of the `most` best nodes per stage."""


@dataclass(slots=True)  # not frozen, which takes three times as long
class Placement:
    """The chosen prefill and decode node of a request."""

    prefill: str
    decode: str
    prefix_source: str  # "local", "pool", "arena" of another node, or "none"
    prefix_tokens: int  # tokens not computed
    estimates: dict[str, float]  # wait_s, transfer_s, prefill_s, ttft_s, handover_s, step_s
    stages: tuple[Stage, ...] = field(default=(), repr=False, compare=False)
    group: Group | None = None  # several nodes compute the prompt; the first of them is `prefill`
    beyond: bool = False  # its KV exceeds the arena of the one node that does it all (sched/beyond.py)

    @property
    def considered(self) -> list[Row]:
        """See `listed`."""
        return listed(self.stages)

    @property
    def prefills(self) -> tuple[str, ...]:
        """All nodes that compute the prompt; the last one samples its first token."""
        return (self.prefill,) if self.group is None else self.group.nodes


@dataclass(frozen=True, slots=True)
class Rejected:
    """No placement. `retry_after_s` is None when waiting does not help (a role is missing, the prompt never fits)."""

    reason: str
    retry_after_s: float | None
    missing_role: str = ""  # no node has it
    stages: tuple[Stage, ...] = field(default=(), repr=False, compare=False)

    @property
    def considered(self) -> list[Row]:
        """See `listed`."""
        return listed(self.stages)


def listed(stages: Sequence[Stage]) -> list[Row]:
    """One row per candidate and stage: the best MAX_ROWS of each stage, best first. Computed on demand, because it
    takes longer than the decision."""
    return [row for stage in stages for row in stage.rows(MAX_ROWS)]


class PlacementPolicy(Protocol):
    """Chooses nodes of a view. It depends only on the arguments, its rng and its past decisions."""

    def shortlist(self, now: float, demand: Demand, view: View, matched: Vector) -> Sequence[int]:
        """Indices of the nodes to ask for their load and longest prefix. `place` then gets a view of the nodes that
        answered. Empty: `place` decides from gossip alone."""

    def place(self, now: float, demand: Demand, view: View, matched: Vector) -> Placement | Rejected:
        """matched [N]: leading tokens of the prompt that each node of the view holds, in whole blocks."""


@runtime_checkable
class LearningPolicy(Protocol):
    """A policy that learns from the results of its placements."""

    def observed(self, node: str, estimates: Mapping[str, float], ttft_s: float) -> None:
        """A request placed on prefill node `node` with these estimates (Placement.estimates) got its first token
        `ttft_s` after the decision."""
