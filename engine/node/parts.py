"""The inputs of a node's parts, in groups: its blocks, its measurements, its services."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.block import BlockGeometry, BlockKey
from cache.tiers.local_store import LocalStore
from engine.front.acceptor import Acceptor
from engine.node.phases import Phases
from engine.observe.history import History
from engine.scaling.rank_scaler import RankScaler
from engine.scaling.scaler import Scaler
from engine.update.member import WeightsMember
from net.loop.stalls import StallMonitor
from net.metrics.events import Metrics

if TYPE_CHECKING:
    from engine.backends.fleet import Fleet
    from engine.beyond.holder import Holder  # torch, which a store node does not load
    from engine.node.engine import Engine
    from engine.node.kv_events import KvEvents  # ZeroMQ


@dataclass(frozen=True, slots=True)
class Blocks:
    """The KV blocks of the cluster: their shape, that of this node's own, the root of their keys, and this node's share
    of the pool."""

    geometry: BlockGeometry
    own: BlockGeometry
    root: BlockKey
    share: LocalStore | None


@dataclass(frozen=True, slots=True)
class Measures:
    """The node's measurements of itself."""

    metrics: Metrics
    stalls: StallMonitor  # of the event loop
    phases: Phases  # of the start
    history: History  # of the last minutes

    def phase(self, name: str) -> None:
        """The part `name` of the start ends now."""
        self.phases.end(name, time.monotonic())


@dataclass(slots=True)
class Serving:
    """The parts that serve; the node fills this in during its start."""

    unready: str | None = "starting"  # why it does not serve yet, or no longer
    gave_up: str | None = None  # why the node decided to leave
    engine: Engine | None = None  # of a prefill or decode node
    acceptor: Acceptor | None = None  # of a node with a model
    kv_events: KvEvents | None = None  # of a node with --kv-events-config
    fleet: Fleet | None = None  # of a node with --backend
    weights: WeightsMember | None = None
    scaler: Scaler | None = None  # of a node with --scale-command
    rank_scaler: RankScaler | None = None  # of a node with --expert-scale-command
    holder: Holder | None = None  # of a node with --attention-elsewhere
    weight_dtype: str | None = None  # --weight-dtype of the engine, not auto; without one, of the node that was joined

    @property
    def not_ready(self) -> str | None:
        """The reason in /health; None: ready."""
        return self.unready or (None if self.weights is None else self.weights.behind)

    @property
    def lost(self) -> str | None:
        """Why this node cannot continue; None while it can."""
        return self.gave_up or (None if self.engine is None else self.engine.lost)

    @property
    def accepted(self) -> int:
        """Unfinished requests of this node's clients."""
        return 0 if self.acceptor is None else self.acceptor.open

    @property
    def computing(self) -> int:
        """Requests for which an acceptor, on this or another node, waits for this engine."""
        return 0 if self.engine is None or self.engine.lost is not None else self.engine.service.owed()
