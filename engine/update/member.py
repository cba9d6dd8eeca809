"""WeightsMember: the weights that one node serves. It switches when it is told, and follows when it missed that.

Load records carry one byte that differs for other weights (ServedWeights.tag). A node that sees another byte than its
own asks that node, and takes the newer weights: so does a node that was cut off, or that starts while the cluster
serves replaced weights. An engine without the weights reads them from the pool. Until it has them, the node is not
ready: others place nothing on it, and it refuses requests that need them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from engine.update.messages import (
    ABANDON,
    PREPARE,
    RELEASE,
    SWITCH,
    TELL,
    Abandon,
    Prepare,
    Prepared,
    Release,
    Switch,
    Told,
)
from engine.update.served import ServedWeights
from net.bodies import Nothing, answered, encode, typed
from net.channel.channel import Channel
from net.errors import PeerLost, PeerRefused, RemoteError
from net.gossip.driver import Gossip
from net.loop.tasks import keep, spawn
from sched.membership.member import Rng

if TYPE_CHECKING:
    from engine.update.holder import WeightHolder  # torch, which a store node does not load

log = logging.getLogger("mooncake.weights")

WATCH_S = 0.5
FOLLOW_PAUSE_S = 2.0
LEASE_S = 60.0
"""For weights that this node reads for itself."""


class WeightsMember:
    """`show(served)` is called when this node serves other weights; `open_()`: unfinished requests of this node's
    clients by weights; `keep_s`: after this time no request can need replaced weights."""

    def __init__(
        self,
        channel: Channel,
        gossip: Gossip,
        rng: Rng,
        show: Callable[[ServedWeights], None],
        open_: Callable[[], Mapping[bytes, int]],
        keep_s: float,
    ) -> None:
        self.served = ServedWeights()
        self.behind: str | None = None  # why the engine does not have them yet
        self._channel, self._gossip, self._rng = channel, gossip, rng
        self._show, self._open, self._keep_s = show, open_, keep_s
        self._holder: WeightHolder | None = None
        self._following: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        channel.handle(PREPARE, typed(Prepare, self._on_prepare))
        channel.handle(ABANDON, typed(Abandon, self._on_abandon))
        channel.handle(SWITCH, typed(Switch, self._on_switch))
        channel.handle(TELL, typed(Nothing, self._on_tell))
        channel.handle(RELEASE, typed(Release, self._on_release))

    def start(self) -> None:
        self._watching = keep(self._watch, "weights of the cluster")

    @property
    def held(self) -> list[str]:
        """Keys of the weights in this node's memory; empty on a node that computes nothing."""
        return [] if self._holder is None else self._holder.held

    async def hold(self, holder: WeightHolder) -> None:
        """The engine is there. Returns when it has the weights that the cluster serves, or could not read them; then it
        tries again later."""
        self._holder = holder
        self._settle()
        if self._following is not None:
            await self._tried.wait()

    def take(self, served: ServedWeights) -> None:
        """Serve these weights, if they are newer."""
        if not served.newer(self.served):
            return
        log.info("the cluster serves weights %s, version %r", served.key, served.version)
        self.served = served
        self._show(served)
        self._settle()

    def _settle(self) -> None:
        if self._holder is None:
            return
        if self._holder.switch(self.served.content):
            self.behind = None
        elif self._following is None:
            self.behind = f"reading the weights of version {self.served.version!r}, which the cluster serves"
            self._following = spawn(self._follow(self._holder), "following the cluster's weights")

    async def _follow(self, holder: WeightHolder) -> None:
        try:
            while not holder.switch((served := self.served).content):
                name = f"{self._channel.node_id} follows {served.generation}"
                try:
                    made = await holder.prepare(name, served.prefix, served.tenant, LEASE_S)
                    if made.key != self.served.content:
                        holder.abandon(name)
                    if made.key != served.content:
                        raise RemoteError(f"the tensors under {served.prefix!r} are others by now", "failed")
                except RemoteError as error:
                    self.behind = f"the cluster serves weights of version {served.version!r}, and this node: {error}"
                    log.warning("%s", self.behind)
                    self._tried.set()
                    await asyncio.sleep(FOLLOW_PAUSE_S)
            self.behind = None
            holder.release(())
        finally:
            self._following = None
            self._tried.set()

    # --- what others do

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            ids, rows = self._gossip.table
            differ = ((rows["weights"] != self.served.tag) & (rows["version"] > 0)).nonzero()[0].tolist()
            if others := [ids[row] for row in differ if ids[row] != self._channel.node_id]:
                await self._ask(self._rng.choice(others))
            if self._holder is not None:
                self._holder.release((), older_than_s=self._keep_s)

    async def _ask(self, node_id: str) -> None:
        try:
            body, _ = await self._channel.call(node_id, TELL, encode(Nothing()))
            self.take(answered(Told, body).served)
        except (PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            log.info("%s does not tell its weights: %s", node_id, error)

    async def _on_tell(self, peer: str, body: Nothing, data: memoryview) -> Told:
        return Told(self.served, {weights.hex(): count for weights, count in self._open().items()})

    # --- a replacement (engine/update/coordinator.py)

    async def _on_prepare(self, peer: str, body: Prepare, data: memoryview) -> Prepared:
        if self._holder is None:
            raise RemoteError("it still loads its model", "busy")
        if body.generation <= self.served.generation:
            raise RemoteError(f"generation {body.generation} is not newer than {self.served.generation}", "busy")
        made = await self._holder.prepare(body.update, body.prefix, body.tenant, body.lease_s)
        return Prepared(made.key.hex(), made.nbytes, made.read_s, made.seconds)

    async def _on_abandon(self, peer: str, body: Abandon, data: memoryview) -> None:
        if self._holder is not None:
            self._holder.abandon(body.update)

    async def _on_switch(self, peer: str, body: Switch, data: memoryview) -> None:
        self.take(body.served)

    async def _on_release(self, peer: str, body: Release, data: memoryview) -> None:
        if self._holder is not None:
            self._holder.release([bytes.fromhex(key) for key in body.keys])

    async def close(self) -> None:
        """Call it before the engine closes."""
        tasks = [task for task in (self._watching, self._following) if task is not None]
        for task in tasks:
            task.cancel()
        if self._holder is not None:
            await self._holder.close()
        await asyncio.gather(*tasks, return_exceptions=True)
