"""In-memory Channel and TransferEngine: the contract of net/ without sockets, with faults on demand."""

import asyncio
import logging
from logging import DEBUG, ERROR
from types import SimpleNamespace

import orjson

from net.bodies import BodyError
from net.errors import PeerLost, RemoteError, TransferError
from net.transfer.engine import Op

log = logging.getLogger(__name__)


class Hub:
    """The network: all nodes, who is dead, who hangs."""

    def __init__(self) -> None:
        self.channels = {}
        self.transfers = {}
        self.dead = set()
        self.hanging = set()
        self.stalled = set()  # no bytes come from them, or go there
        self.calls = []  # (from, to, kind)
        self.dropped = []  # (by, whom)
        self.weather = None  # tests/cache/virtual.py

    async def cross(self, source, target):
        if self.weather is not None:
            await self.weather.cross(source, target)

    def node(self, node_id):
        self.channels[node_id] = FakeChannel(node_id, self)
        self.transfers[node_id] = FakeTransfer(node_id, self)
        return self.channels[node_id], self.transfers[node_id]

    def kill(self, node_id):
        """The node is gone and its peers notice."""
        self.dead.add(node_id)
        for peer in self.channels:
            if peer not in self.dead:
                self.lose(peer, node_id)

    def lose(self, peer, node_id):
        """`peer` notices that the connection to `node_id` is broken."""
        for callback in self.channels[peer].lost_callbacks:
            callback(node_id)


class FakeChannel:
    def __init__(self, node_id, hub) -> None:
        self.node_id = node_id
        self.hub = hub
        self.handlers = {}
        self.lost_callbacks = []
        self.closed_callbacks = []
        self.tasks = set()

    def handle(self, kind, handler):
        self.handlers[kind] = handler

    def on_lost(self, callback):
        self.lost_callbacks.append(callback)

    def on_closed(self, callback):
        self.closed_callbacks.append(callback)

    def drop(self, peer_id, reason):
        self.hub.dropped.append((self.node_id, peer_id))
        self.hub.lose(self.node_id, peer_id)
        self.hub.lose(peer_id, self.node_id)

    async def call(self, peer_id, kind, body, data=(), timeout_s=10.0):
        self.hub.calls.append((self.node_id, peer_id, kind))
        if {peer_id, self.node_id} & self.hub.dead or peer_id not in self.hub.channels:
            raise PeerLost(peer_id)
        work = asyncio.create_task(self.hub.channels[peer_id].serve(self.node_id, kind, body, data))
        self.tasks.add(work)
        work.add_done_callback(self._served)
        async with asyncio.timeout(timeout_s):
            if peer_id in self.hub.hanging:
                await asyncio.Event().wait()
            return await asyncio.shield(work)

    async def serve(self, from_id, kind, body, data):
        data = [bytes(part) for part in data]
        await self.hub.cross(from_id, self.node_id)
        if kind not in self.handlers:
            raise RemoteError(f"no handler for {kind}", "unknown")
        sent = orjson.loads(orjson.dumps(body))  # only what JSON carries arrives
        try:
            reply = await self.handlers[kind](from_id, sent, memoryview(b"".join(data)))
        except BodyError as error:
            raise RemoteError(str(error), "bad_request") from None
        body, payload = reply if isinstance(reply, tuple) else (reply or {}, ())
        payload = [bytes(part) for part in payload]
        await self.hub.cross(self.node_id, from_id)
        return orjson.loads(orjson.dumps(body)), memoryview(b"".join(payload))

    def post(self, peer_id, kind, body, data=()):
        self.hub.calls.append((self.node_id, peer_id, kind))
        if not {peer_id, self.node_id} & self.hub.dead:
            work = asyncio.create_task(self.hub.channels[peer_id].serve(self.node_id, kind, body, data))
            self.tasks.add(work)
            work.add_done_callback(self._served)

    def _served(self, work):
        """A refusal may come when its caller is gone; what else a handler raises is a bug, as in
        net/channel/channel.py."""
        self.tasks.discard(work)
        if not work.cancelled() and isinstance(work.exception(), Exception):
            log.log(DEBUG if isinstance(work.exception(), RemoteError) else ERROR, "handler", exc_info=work.exception())


class FakeTransfer:
    def __init__(self, node_id, hub) -> None:
        self.node_id = node_id
        self.hub = hub
        self.regions = {}
        self.gate = asyncio.Event()  # transfers wait for it
        self.gate.set()
        self.started = asyncio.Event()
        self.fence_gate = asyncio.Event()  # fences wait for it
        self.fence_gate.set()
        self.fenced = {}  # home -> how often it has fenced this node off: what began before moves nothing
        self.error = None  # raised instead of a transfer
        self.flip = None  # (remote offset): one byte of a READ that arrives wrong
        self.priorities = set()  # of its writes so far

        self.bulk = SimpleNamespace(  # nobody is reached this way: tests/cache/store/test_bulk.py has the real thing
            reaches=lambda peer_id: False,
            reaches_same_host=lambda peer_id: False,
            answer=lambda kind, answerer: None,
            receive=lambda kind, receiver: None,
        )

    def register(self, region):
        self.regions[region.name] = region

    def path_of(self, peer_id):
        return None

    def may_be_one_sided(self, peer_id):
        return False

    def is_one_sided(self, peer_id):
        return False

    async def mapped(self, peer_id, remote):
        return None

    async def submit(self, peer_id, op, local, remote, spans, timeout_s=30.0, priority=0, epoch=None):
        self.started.set()
        if op is Op.WRITE:
            self.priorities.add(priority)
        await asyncio.sleep(0)
        gate = asyncio.Event() if peer_id in self.hub.stalled else self.gate
        await asyncio.wait_for(gate.wait(), timeout_s)
        life = self.fenced.get(peer_id, 0)
        async with asyncio.timeout(timeout_s):
            await self.hub.cross(self.node_id, peer_id)
        if life != self.fenced.get(peer_id, 0):
            raise PeerLost(peer_id)
        if self.error is not None:
            raise self.error
        if {peer_id, self.node_id} & self.hub.dead:
            raise PeerLost(peer_id)
        ours, theirs = self.regions[local].memory, self.hub.transfers[peer_id].regions[remote].memory
        for at, there, length in spans:
            if at + length > len(ours) or there + length > len(theirs):
                raise TransferError("span outside the region")
            if op is Op.READ:
                ours[at : at + length] = theirs[there : there + length]
                if self.flip == there:
                    ours[at + length // 2] ^= 1
            else:
                theirs[there : there + length] = ours[at : at + length]
        transport = "local" if peer_id == self.node_id else "fake"
        return SimpleNamespace(nbytes=sum(span[2] for span in spans), seconds=0.0, transport=transport)

    def epoch_of(self, peer_id):
        return "now"

    async def fence(self, peer_id, timeout_s=10.0):
        await asyncio.wait_for(self.fence_gate.wait(), timeout_s)
        fenced = self.hub.transfers[peer_id].fenced
        fenced[self.node_id] = fenced.get(self.node_id, 0) + 1
