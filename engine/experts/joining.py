"""Joining: a process of another host becomes a rank of a node: what both say before the first message. Pure.

    rank -> node   {"join": Joining}
    node -> rank   {"welcome": Welcome}, or {"refused": why, "again": whether to ask again}
    rank -> node   {"want": [layer, slot]} for each expert that it cannot read itself
    node -> rank   {"expert": [layer, slot]} + the weights: the parts of engine/experts/share.py
    rank -> node   {"loading": true} now and then, while it progresses; at last {"ready": true}, or {"failed": why}

Then messages and answers follow, and what the two say at the end (net/rounds/remote_desk.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import __version__
from engine.experts.placing.placement import Placement
from engine.experts.plan import Duty, Plan

SILENCE_S = 10.0
"""A connection on which nothing comes for this long has ended: a rank beats every 10 ms, also while it has no work."""
LOADING_S = 180.0
"""The same while a rank loads."""
VERSION = f"{__version__}/3"
"""The second number counts changes of what is said here and of the messages."""


@dataclass(frozen=True, slots=True)
class Joining:
    """A process that would like to be a rank. `instance`: the same for all connections of a process."""

    version: str
    instance: str
    fingerprint: str = ""  # of the model it has; "": it gets the weights from the node
    rank: int = -1  # that it was


@dataclass(frozen=True, slots=True)
class Welcome:
    """What it is to be."""

    rank: int
    fingerprint: str
    plan: Plan
    placement: Placement

    @property
    def added(self) -> bool:
        """Whether the node can do without this rank."""
        return self.rank >= self.plan.least

    @property
    def duty(self) -> Duty:
        return Duty(self.rank, self.plan, self.placement)


def refusal(joining: Joining, fingerprint: str) -> str | None:
    """Why a process cannot be a rank of the node with this model; None if it can."""
    if joining.version != VERSION:
        return f"it runs version {joining.version}, the node runs {VERSION}: run the same release on all hosts"
    if joining.fingerprint not in ("", fingerprint):
        return "its --model is another one than the node's: give the same, or none to get the weights from the node"
    return None
