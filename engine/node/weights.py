"""The weights of a node, assembled: what it serves, how it follows the cluster, and what it replaces itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from cache.block import BlockKey
from cache.keys import weights_root
from engine.checkpoint.model_source import ModelSource
from engine.config.config import Config
from engine.front.cluster import Cluster
from engine.node.parts import Serving
from engine.update.coordinator import WeightUpdates
from engine.update.member import WeightsMember
from engine.update.served import ServedWeights, served_of
from sched.gossip.load_word import READING
from sched.gossip.state import NodeRecord


class NodeWeights:
    """`root`: of the keys of the cluster's blocks, with the weights of --model."""

    def __init__(self, config: Config, source: ModelSource, cluster: Cluster, root: BlockKey, serving: Serving) -> None:
        self._config, self._source, self._cluster, self._root, self._serving = config, source, cluster, root, serving
        keep_s = config.request_timeout_ms / 1000
        gossip, channel = cluster.gossip, cluster.channel
        self.member = WeightsMember(channel, gossip, random.Random(), self._show, self._open, keep_s)
        self._updates = WeightUpdates(channel, self.member, lambda: gossip.members)

    def start(self, cluster: Mapping[str, Any] | None) -> None:
        """Gossip runs; `cluster`: the answer of the node to join to GET /cluster."""
        self._serving.weight_dtype = (cluster or {}).get("weight_dtype")
        self.member.take(served_of(cluster))
        self.member.start()

    async def hold(self) -> None:
        """The engine is there: it gets the weights that the cluster serves."""
        from engine.update.holder import WeightHolder  # torch

        assert self._serving.engine is not None
        worker, store = self._serving.engine.worker, self._cluster.store
        await self.member.hold(WeightHolder(self._config, self._source, worker, store))

    @property
    def root(self) -> BlockKey:
        """Of the keys of new requests without a cache salt."""
        return weights_root(self._root, self.member.served.content)

    def onto(self, record: NodeRecord) -> NodeRecord:
        """The record with the tag of the weights. A node without them takes no requests."""
        flags = record.flags | READING * (self.member.behind is not None)
        return replace(record, weights=self.member.served.tag, flags=flags)

    def told(self) -> dict[str, Any]:
        """For GET /cluster: what a joining node must know. `weight_dtype`: for --weight-dtype auto; None if neither
        this node nor the one that it joined has loaded weights."""
        served = asdict(self.member.served) | {"root": self.root.hex()}
        return {"weights": served, "weight_dtype": self._serving.weight_dtype}

    def state(self) -> dict[str, Any]:
        """GET /v1/update_weights."""
        return {
            **asdict(self.member.served),
            "root": self.root.hex(),
            "updating": self._updates.running,
            "behind": self.member.behind,
            "held": self.member.held,
        }

    async def update(self, prefix: str, version: str, tenant: str, timeout_s: float) -> dict[str, Any]:
        """See Frontend.update_weights."""
        figures = await self._updates.update(prefix, version, tenant, timeout_s)
        return figures | {"root": self.root.hex()}

    def _show(self, served: ServedWeights) -> None:
        if self._serving.acceptor is not None:
            self._serving.acceptor.renew(served.content)
        if self._serving.kv_events is not None:
            self._serving.kv_events.renewed(self.root)

    def _open(self) -> Counter[bytes]:
        acceptor = self._serving.acceptor
        return Counter() if acceptor is None else acceptor.open_by_weights()

    async def close(self) -> None:
        """Call it before the engine closes."""
        await self._updates.close()
        await self.member.close()
