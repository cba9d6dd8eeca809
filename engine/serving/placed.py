"""A placement with what it took to get there: the answers of the nodes that were asked, and the time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sched.placements.choice import Placement
from sched.placements.view import Candidate


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What a node said of itself, beside what gossip had told of it."""

    candidate: Candidate
    local_tokens: int  # leading tokens of the prompt that it has
    round_trip_s: float
    gossiped_wait_s: float | None  # None: gossip had told nothing yet
    gossip_age_s: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "node": self.candidate.node_id,
            "wait_s": self.candidate.wait_s,
            "gossiped_wait_s": self.gossiped_wait_s,
            "gossip_age_s": self.gossip_age_s,
            "local_tokens": self.local_tokens,
            "round_trip_s": self.round_trip_s,
        }


@dataclass(frozen=True, slots=True)
class Placed:
    """One decision of the placer."""

    placement: Placement
    probes: Sequence[ProbeAnswer]
    asked: int  # nodes; probes holds those that answered
    seconds: float  # from the request to the decision

    def explain(self) -> dict[str, Any]:
        """JSON-ready: the choice, every candidate with its estimates, and what the asked nodes answered."""
        placement = self.placement
        return {
            "prefill": placement.prefill,
            "decode": placement.decode,
            "prefix_source": placement.prefix_source,
            "prefix_tokens": placement.prefix_tokens,
            "estimates": placement.estimates,
            "considered": placement.considered,
            "asked": self.asked,
            "probes": [probe.as_dict() for probe in self.probes],
            "decision_s": self.seconds,
        }
