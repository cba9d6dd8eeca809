"""The messages between nodes about new weights: their kinds and bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.update.served import ServedWeights

PREPARE = "weights.prepare"  # to nodes that compute: read these tensors and keep them ready; answered when they are
ABANDON = "weights.abandon"  # forget what you prepare, or have prepared
SWITCH = "weights.switch"  # to all nodes: the cluster serves these weights from now on
TELL = "weights.tell"  # which weights do you serve, and with which do your clients' requests run?
RELEASE = "weights.release"  # to nodes that compute: only these are still in use


@dataclass(frozen=True, slots=True)
class Prepare:
    """PREPARE. `generation`: that of the cluster afterwards."""

    update: str  # names this replacement, until its end
    generation: int
    prefix: str
    tenant: str
    lease_s: float  # forget them if nothing else is heard for so long


@dataclass(frozen=True, slots=True)
class Prepared:
    """The answer to PREPARE."""

    key: str  # as in ServedWeights
    nbytes: int
    read_s: float  # for reading and converting the tensors
    seconds: float  # in all


@dataclass(frozen=True, slots=True)
class Abandon:
    update: str


@dataclass(frozen=True, slots=True)
class Switch:
    """SWITCH; the answer is Nothing, when the next request begins with these weights."""

    served: ServedWeights


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to TELL. `open`: number of unfinished requests that the node accepted, by the key of their weights."""

    served: ServedWeights
    open: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Release:
    keys: Sequence[str]
