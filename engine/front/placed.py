"""A placement with its inputs: the answers of the asked nodes, and the time of the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.handoff.messages import Promise
from net.gossip.load_words import Claim
from sched.gossip.intents import Coming
from sched.gossip.record import NodeRecord
from sched.membership.member import Member
from sched.placement.choice import Placement

KEPT_NODES = 64


@dataclass(slots=True)  # not frozen, which takes three times as long: there is one for each asked node
class ProbeAnswer:
    """A node's answer about itself, together with what gossip said about it."""

    member: Member
    record: bytes  # packed, see sched/gossip/record.py
    claimed_s: float  # announced work that the record does not include
    ahead: tuple[float, float, float] | None  # its forecast of step_soon_s, step_alone_s, decode_s
    local_tokens: int  # leading tokens of the prompt that it holds
    round_trip_s: float
    gossiped_wait_s: float | None  # None: gossip had no record yet
    gossip_age_s: float | None
    claimed: int  # total claims of all acceptors since its start; see sched/gossip/load_word.py
    one_sided: bool = False  # its load word was read, and local_tokens comes from its digest

    def as_dict(self) -> dict[str, Any]:
        return {
            "node": self.member.node_id,
            "wait_s": NodeRecord.unpack(self.record).work_s + self.claimed_s,
            "gossiped_wait_s": self.gossiped_wait_s,
            "gossip_age_s": self.gossip_age_s,
            "local_tokens": self.local_tokens,
            "round_trip_s": self.round_trip_s,
            "one_sided": self.one_sided,
        }


@dataclass(frozen=True, slots=True)
class Placed:
    """One decision of the placer."""

    placement: Placement
    probes: Sequence[ProbeAnswer]
    asked: int  # number of asked nodes; `probes` has the answers
    seconds: float  # from the request to the decision
    claim: Claim | None = None  # the work announced to the prefill node
    runners_up: int = 0  # decisions repeated because others had claimed the same node meanwhile
    computing: Mapping[str, Coming] = field(default_factory=dict)  # nodes that compute a part of the prompt

    @property
    def estimates(self) -> Mapping[str, float]:
        return self.placement.estimates

    def promise(self, redirects_left: int) -> Promise:
        """The message to the prefill node: its claim, and the acceptor's expectations."""
        estimates = self.placement.estimates
        claim = 0 if self.claim is None else self.claim.amount
        return Promise(claim, estimates["wait_s"], estimates["ttft_s"], redirects_left)

    def explain(self) -> dict[str, Any]:
        """JSON-ready: the choice, every candidate with its estimates, and the answers of the asked nodes."""
        placement = self.placement
        return {
            "prefill": placement.prefill,
            "decode": placement.decode,
            "group": None if placement.group is None else placement.group.as_dict(),
            "beyond_memory": placement.beyond,
            "prefix_source": placement.prefix_source,
            "prefix_tokens": placement.prefix_tokens,
            "estimates": placement.estimates,
            "considered": placement.considered,
            "asked": self.asked,
            "probes": [probe.as_dict() for probe in self.probes],
            "claim": None if self.claim is None else {"amount": self.claim.amount, "one_sided": self.claim.one_sided},
            "runners_up": self.runners_up,
            "computing": [
                {"node": node, "blocks": coming.depth, "ready_s": coming.ready_s}
                for node, coming in self.computing.items()
            ],
            "decision_s": self.seconds,
        }

    def kept(self) -> Placed | Told:
        """The form to keep for a later `explain`. For a large cluster it explains now, so that it does not keep the
        columns of all nodes."""
        nodes = max((len(stage.view) for stage in self.placement.stages), default=0)
        return self if nodes <= KEPT_NODES else Told(self.estimates, self.explain())


@dataclass(frozen=True, slots=True)
class Told:
    """A decision with its explanation, written when the decision was made."""

    estimates: Mapping[str, float]
    explanation: dict[str, Any]

    def explain(self) -> dict[str, Any]:
        return self.explanation
