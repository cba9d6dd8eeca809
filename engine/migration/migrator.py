"""Moves running requests to other decode nodes: when this node leaves, when the load is uneven, before blocks run out.

The shell of sched/migration.py: it reads the gossiped records every PERIOD_S, and starts the moves of
engine/migration/outgoing.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from engine.config.agreement import kv_of
from engine.config.config import Config
from engine.core.engine_load import EngineLoad
from engine.core.worker import Worker
from engine.front.cluster import Cluster
from engine.handoff.outgoing import KvMoves
from engine.handoff.service import EngineService
from engine.migration.arriving import Arriving
from engine.migration.outgoing import Outgoing
from engine.step.request import Request, RequestState
from net.loop.tasks import keep, spawn
from net.metrics.events import Metrics
from sched.gossip.load_word import CLOSED, ROLE_BITS
from sched.gossip.record import NodeRecord
from sched.membership.member import Status
from sched.migration import Balancer, DecodeNode, Movable, in_need, to_balance, to_leave

log = logging.getLogger("mooncake.migration")

PERIOD_S = 0.05
SETTLE_S = 0.5
"""After a move to balance: until the records of both nodes show it."""

REFUSED_S = 1.0
"""A node that refused is not asked for so long."""

LEAVING_AT_ONCE = 4
"""Moves at the same time of a node that leaves; otherwise one."""


class Migrator:
    """The moves of one engine node. `how`: --migration."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        worker: Worker,
        service: EngineService,
        moves: KvMoves,
        load: EngineLoad,
        metrics: Metrics,
    ) -> None:
        self._config, self._gossip, self._worker, self._service, self._load = (
            config,
            cluster.gossip,
            worker,
            service,
            load,
        )
        self._outgoing = Outgoing(cluster.channel, worker, service, moves, metrics)
        self._arriving = Arriving(cluster.channel, worker, service, self._takes)
        self._balancer = Balancer(config.node_id)
        self._quiet_until = 0.0
        self._refused: dict[str, float] = {}  # node -> until when
        self._task: asyncio.Task[None] | None = None
        self._moves: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Number of moves from this node in progress."""
        return len(self._outgoing)

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per transfer reference held here."""
        return self._outgoing.held_blocks()

    def start(self) -> None:
        if self._config.migration != "none" and "decode" in self._config.roles:
            self._task = keep(self._run, "moving requests")

    async def close(self) -> None:
        tasks = [*self._moves, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._outgoing.close()
        self._arriving.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            if self._worker.lost is None:
                self._look(time.monotonic())

    def _look(self, now: float) -> None:
        leaves, balances = self._load.draining, self._config.migration == "balance" and not self._moves
        requests = self._movable() if leaves or balances else []
        if not requests:
            return
        if leaves:
            busy = self._outgoing.nodes()
            nodes = [node for node in self._others(now) if node.node_id not in busy]
            while len(self._moves) < LEAVING_AT_ONCE and (found := to_leave(requests, nodes)) is not None:
                one, node = found
                requests.remove(one)
                nodes.remove(node)
                self._begin(one, node.node_id, "drain")
        else:
            self._balance(now, requests)

    def _balance(self, now: float, requests: list[Movable]) -> None:
        others = self._others(now)
        free = self._worker.batcher.pool.num_free * self._config.pooled_per_block
        found = in_need(requests, free, others)
        if found is not None:
            self._begin(found[0], found[1].node_id, "pressure")
            return
        me = _decode_node(self._config.node_id, self._load.record())
        partner = self._balancer.partner([me, *others]) if now >= self._quiet_until else None
        if partner is not None and (one := to_balance(requests, me, partner)) is not None:
            self._begin(one, partner.node_id, "balance")

    def _begin(self, one: Movable, to: str, why: str) -> None:
        request = self._worker.batcher.requests[one.request_id]
        task = spawn(self._move(request, to, why), "moving a request")
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    async def _move(self, request: Request, to: str, why: str) -> None:
        moved = await self._outgoing.move(request, to, why)
        now = time.monotonic()
        self._quiet_until = now + SETTLE_S
        if not moved and not request.finished:
            self._refused[to] = now + REFUSED_S

    def _takes(self) -> bool:
        """Whether running requests may move here."""
        load = self._load
        return "decode" in load.does and not load.draining and self._worker.lost is None

    def _movable(self) -> list[Movable]:
        """Requests that decode here and belong to a living acceptor."""
        moving, size = self._outgoing.ids(), self._config.cluster_block_size
        return [
            Movable(request.request_id, -(-request.num_tokens // size) + 1, self._left(request))
            for request in self._worker.batcher.requests.values()
            if request.state in (RequestState.RUNNING, RequestState.WAITING)
            and request.num_uncomputed == 1
            and not request.handover
            and not request.others  # a move does not know the blocks of further groups
            and request.cold is None  # ... and of the tier
            and request.num_output_tokens
            and request.request_id not in moving
            and self._service.acceptor_of(request.request_id) is not None
        ]

    def _left(self, request: Request) -> int:
        most = min(request.sampling.max_tokens - request.num_output_tokens, self._config.max_model_len)
        mean = self._load.lengths.mean
        return (
            most if request.sampling.ignore_eos else min(most, max(round(mean - request.num_output_tokens), most // 2))
        )

    def _others(self, now: float) -> list[DecodeNode]:
        """Living decode nodes that take requests, without those that refused one a moment ago. A move copies blocks as
        they are, so nodes with other blocks are no destination, nor are those of another site, whose link is slow."""
        records, own = self._gossip.records, kv_of(self._gossip.me.info)
        return [
            _decode_node(member.node_id, record)
            for member in self._gossip.members
            if member.status is Status.ALIVE
            and member.node_id != self._config.node_id
            and kv_of(member.info) == own
            and member.site == self._gossip.me.site
            and (record := records.get(member.node_id)) is not None
            and record.flags & ROLE_BITS["decode"]
            and not record.flags & CLOSED
            and record.blocks_total
            and self._refused.get(member.node_id, 0.0) <= now
        ]


def _decode_node(node_id: str, record: NodeRecord) -> DecodeNode:
    return DecodeNode(
        node_id, record.blocks_used, record.blocks_total, record.running + record.waiting, record.max_running
    )
