"""A decision against a request: what its client is told, and what led there, kept to be explained like a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.front.placed import KEPT_NODES, ProbeAnswer, Told
from net.http.common.frontend import Overloaded, Unavailable
from sched.placement.choice import Placement, Rejected, Stage, listed
from sched.rejection import Refusal

NO_NODE_RETRY_S = 5.0
"""Retry-After when no node has the role. The acceptor cannot know when such a node will start."""

NEVER_RETRY_S = 60.0
"""Retry-After when the prompt fits on no node: a larger node would have to join."""


@dataclass(frozen=True, slots=True)
class Declined:
    """`refused` is JSON-ready: reason, retry_after_s, and for a missed objective its name, limit and estimate."""

    refused: Mapping[str, Any]
    stages: Sequence[Stage]
    placement: Placement | None = None  # the placement that --rejection refused
    probes: Sequence[ProbeAnswer] = ()
    asked: int = 0
    seconds: float = 0.0
    estimates: Mapping[str, float] = field(default_factory=dict)

    def explain(self) -> dict[str, Any]:
        """JSON-ready, with the fields of Placed.explain."""
        chosen = self.placement
        return {
            "prefill": None if chosen is None else chosen.prefill,
            "decode": None if chosen is None else chosen.decode,
            "prefix_source": None if chosen is None else chosen.prefix_source,
            "prefix_tokens": 0 if chosen is None else chosen.prefix_tokens,
            "estimates": self.estimates,
            "considered": listed(self.stages),
            "asked": self.asked,
            "probes": [probe.as_dict() for probe in self.probes],
            "claim": None,
            "runners_up": 0,
            "computing": [],
            "decision_s": self.seconds,
            "refused": dict(self.refused),
        }

    def kept(self) -> Declined | Told:
        """The form to keep for a later `explain`. For a large cluster it explains now, so that it does not keep the
        columns of all nodes."""
        nodes = max((len(stage.view) for stage in self.stages), default=0)
        return self if nodes <= KEPT_NODES else Told(self.estimates, self.explain())


class NotPlaced(Exception):
    """No placement. With `missing_role`, a node with that role must start; with `overloaded`, a retry may succeed."""

    def __init__(self, declined: Declined, missing_role: str = "", overloaded: bool = False) -> None:
        super().__init__(declined.refused["reason"])
        self.declined, self.missing_role, self.overloaded = declined, missing_role, overloaded

    def answer(self) -> Overloaded | Unavailable:
        """The message of the API."""
        kind = Overloaded if self.overloaded else Unavailable
        return kind(str(self), self.declined.refused["retry_after_s"])


def no_placement(decision: Rejected, probes: Sequence[ProbeAnswer], asked: int, seconds: float) -> NotPlaced:
    """The policy found no node."""
    retry_s = decision.retry_after_s
    if retry_s is None:
        retry_s = NO_NODE_RETRY_S if decision.missing_role else NEVER_RETRY_S
    refused = {"reason": decision.reason, "retry_after_s": retry_s}
    declined = Declined(refused, decision.stages, None, probes, asked, seconds)
    return NotPlaced(declined, decision.missing_role, overloaded=decision.retry_after_s is not None)


def turned_away(
    refusal: Refusal, decision: Placement, probes: Sequence[ProbeAnswer], asked: int, seconds: float
) -> NotPlaced:
    """--rejection refuses the nodes that the policy chose."""
    declined = Declined(refusal.as_dict(), decision.stages, decision, probes, asked, seconds, decision.estimates)
    return NotPlaced(declined, overloaded=True)
