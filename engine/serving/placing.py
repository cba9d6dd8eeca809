"""From a request to a placement: ask the candidates, look the prefix up in the pool, let the policy decide.

The decision itself is pure and lives in sched/placement.py. Gossip names the candidates; before the choice the
likeliest are asked for their load and their longest prefix, because acting on what was gossiped a while ago sends
every acceptor to the same node (reference: stale argmin; sched/state.py ages what it has).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from cache.block import BlockGeometry, BlockKey
from cache.store import Store
from engine.request import Request
from engine.serving import messages
from engine.serving.clocks import Clocks
from net.channel import Channel, PeerLost, RemoteError
from net.gossip import Gossip
from net.http.frontend import Overloaded, Unavailable
from net.shm import boot_id
from sched.cost import TransferModel
from sched.member import Member, Status
from sched.placement import Candidate, Demand, Placement, PlacementPolicy, Rejected
from sched.state import NodeRecord

MAX_PROBES = 8
PROBE_TIMEOUT_S = 1.0


class MeasuredLinks:
    """Transfer times between nodes, learnt from the transfers that requests report."""

    def __init__(self) -> None:
        self._handovers: defaultdict[tuple[str, str], TransferModel] = defaultdict(TransferModel)
        self._fetches: defaultdict[str, TransferModel] = defaultdict(TransferModel)

    def fetch_s(self, node_id: str, nbytes: int) -> float:
        return self._fetches[node_id].estimate(nbytes)

    def handover_s(self, source: str, target: str, nbytes: int) -> float:
        return self._handovers[source, target].estimate(nbytes)

    def learn(self, events: Iterable[dict[str, Any]], decode: str) -> None:
        """Timeline events of a request that decodes on `decode`."""
        for event in events:
            detail = event["detail"]
            if event["event"] == "kv_moved" and detail["bytes"] and detail["seconds"] > 0:
                self._handovers[event["node"], decode].observe(detail["bytes"], detail["seconds"])
            elif event["event"] == "prefix_fetched" and detail["bytes"] and detail["seconds"] > 0:
                self._fetches[event["node"]].observe(detail["bytes"], detail["seconds"])


class Placer:
    """Places requests for this node's acceptor."""

    def __init__(
        self,
        policy: PlacementPolicy,
        channel: Channel,
        gossip: Gossip,
        store: Store,
        geometry: BlockGeometry,
        prefix_caching: bool,
    ) -> None:
        self.links = MeasuredLinks()
        self.clocks = Clocks()
        self._policy = policy
        self._channel = channel
        self._gossip = gossip
        self._store = store
        self._geometry = geometry
        self._prefix_caching = prefix_caching

    async def place(self, request: Request) -> Placement:
        """Raises Overloaded when every node is full, Unavailable when a role is missing or the prompt fits nowhere."""
        keys = self._keys(request)
        pool_tokens, candidates = await asyncio.gather(self._pool_tokens(keys), self._candidates(keys))
        demand = Demand(
            num_tokens=request.num_tokens,
            max_tokens=request.sampling.max_tokens - request.num_output_tokens,
            pool_tokens=pool_tokens,
            block_size=self._geometry.block_size,
            token_bytes=self._geometry.token_bytes,
        )
        decision = self._policy.place(demand, candidates, self.links)
        if isinstance(decision, Rejected):
            if decision.retry_after_s is None:
                raise Unavailable(decision.reason, retry_after_s=1.0)
            raise Overloaded(decision.reason, decision.retry_after_s)
        self._gossip.view.charge(decision.prefill, decision.estimates["prefill_s"])
        return decision

    def _keys(self, request: Request) -> list[BlockKey]:
        """Keys of the prefix worth having: the last token is always computed."""
        if not self._prefix_caching:
            return []
        size = self._geometry.block_size
        return request.block_keys(size)[: (request.num_tokens - 1) // size]

    async def _pool_tokens(self, keys: Sequence[BlockKey]) -> int:
        return await self._store.lookup(keys) * self._geometry.block_size if keys else 0

    async def _candidates(self, keys: Sequence[BlockKey]) -> list[Candidate]:
        """Engine nodes that answered a probe. Those still loading their model do not."""
        engines = [m for m in self._gossip.members if m.status is Status.ALIVE and {"prefill", "decode"} & set(m.roles)]
        if len(engines) > MAX_PROBES:
            records = self._gossip.records
            engines.sort(key=lambda m: records[m.node_id].work_s if m.node_id in records else float("inf"))
        found = await asyncio.gather(*(self._probe(member, keys) for member in engines[:MAX_PROBES]))
        return [candidate for candidate in found if candidate is not None]

    async def _probe(self, member: Member, keys: Sequence[BlockKey]) -> Candidate | None:
        data = [b"".join(keys)] if "prefill" in member.roles else []
        sent = time.time()
        try:
            reply, _ = await self._channel.call(member.node_id, messages.PROBE, {}, data, PROBE_TIMEOUT_S)
        except (PeerLost, RemoteError, TimeoutError):
            return None
        self.clocks.observe(member.node_id, sent, time.time(), reply["unix_s"], reply["boot_id"] == boot_id())
        record = NodeRecord.unpack(bytes.fromhex(reply["record"]))
        return Candidate.of(member, record, reply["local_tokens"])


def explain(placement: Placement) -> dict[str, Any]:
    """JSON-ready: the choice and every candidate with its estimates."""
    return {
        "prefill": placement.prefill,
        "decode": placement.decode,
        "prefix_source": placement.prefix_source,
        "prefix_tokens": placement.prefix_tokens,
        "estimates": placement.estimates,
        "considered": placement.considered,
    }
