"""The asyncio shell of sched.gossip.core.GossipCore: one UDP socket, one timer, callbacks. It makes no decisions."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from net.channel.cluster_key import ClusterKey
from net.gossip.packet_guard import PacketGuard
from net.loop.restarts import Restarts
from net.loop.tasks import tell
from sched.gossip.cells import Rows
from sched.gossip.core import GossipCore
from sched.gossip.digest import key64
from sched.gossip.state import ClusterView, NodeRecord
from sched.membership.events import (
    Datagram,
    Effect,
    Event,
    GiveUp,
    Join,
    Joined,
    Leave,
    MemberDown,
    MemberSuspected,
    MemberUp,
    Refused,
    SendPacket,
    Suspect,
    Tick,
)
from sched.membership.member import Address, Member, Preset, Rng

log = logging.getLogger(__name__)


class JoinRefused(Exception):
    """The cluster does not take this node; the message says why and what to do."""


class Gossip:
    """Membership and load records of a cluster, seen from this node.

    `me.address` is the numeric IP address and port sent to peers; `start` replaces an empty host or port 0.
    `record` is called in the event loop once per state period. `rng` must be seeded differently in every process.
    With a `cluster_key`, every packet is sealed and unsealed ones are dropped. Use as `async with`, or call `close`.
    """

    def __init__(
        self,
        me: Member,
        preset: Preset,
        rng: Rng,
        record: Callable[[], NodeRecord],
        cluster_key: ClusterKey | None = None,
    ) -> None:
        self._guard = PacketGuard(cluster_key)
        self.traffic = {"sent": (0, 0), "received": (0, 0)}  # (packets, bytes) of payload
        self.lost: Counter[str] = Counter()  # lost members by reason: dead, left, restarted
        self._suspicions = 0
        self._me, self._preset, self._rng, self._record = me, preset, rng, record
        self._core: GossipCore | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._restarts = Restarts()
        self._complaints = Restarts()
        self._joining: asyncio.Future[None] | None = None
        self._on_up: list[Callable[[Member], None]] = []
        self._on_down: list[Callable[[Member, str], None]] = []
        self._on_suspected: list[Callable[[str], None]] = []

    # --- life

    async def start(self, host: str, port: int = 0) -> Address:
        """Listen on UDP; returns the address sent to peers.

        Raises OSError if the port is in use, ValueError if the address for peers would be a wildcard.
        """
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Socket(self._received), local_addr=(host, port))
        bound: Address = transport.get_extra_info("sockname")[:2]
        address = (self._me.address[0] or bound[0], self._me.address[1] or bound[1])
        if ip_address(address[0]).is_unspecified:
            transport.close()
            raise ValueError(f"peers cannot reach a node at {address[0]}: start it with --host and its own address")
        self._me = replace(self._me, address=address)
        self._transport = transport
        self._core = GossipCore(loop.time(), self._me, self._preset, self._rng, self._record)
        self._handle(Tick())
        return address

    async def join(self, address: Address, timeout_s: float = 10.0) -> None:
        """Enter the cluster through any of its nodes; returns when the member list is complete.

        Raises JoinRefused with the cluster's reason, TimeoutError if no node answers, OSError for an unknown host.
        """
        host, port = address
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self.me.address[0] else socket.AF_INET
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_DGRAM)
        self._joining = loop.create_future()
        try:
            self._handle(Join((str(found[0][4][0]), port)))
            async with asyncio.timeout(timeout_s):
                await self._joining
        except TimeoutError:
            message = f"no answer from {host}:{port} (UDP) within {timeout_s:g} s: is a node listening there?"
            raise TimeoutError(message) from None
        finally:
            self._joining = None
            self._handle(GiveUp())

    async def leave(self) -> None:
        """Tell the others twice, against packet loss, that this node leaves. Call `close` next."""
        self._handle(Leave())
        await asyncio.sleep(self._preset.gossip_period_s / 2)
        self._handle(Leave())

    async def close(self) -> None:
        """Stop immediately; without `leave`, the others will declare this node dead. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None
            await asyncio.sleep(0)  # the transport closes its socket in the next turn of the loop

    async def __aenter__(self) -> Gossip:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- state

    @property
    def me(self) -> Member:
        """This node's own member entry, with its current incarnation."""
        return self.core.membership.me

    @property
    def members(self) -> list[Member]:
        """This node and all others not known to be dead, ordered by id; suspects have their own status."""
        return self.core.membership.alive()

    @property
    def view(self) -> ClusterView:
        return self.core.view

    @property
    def records(self) -> dict[str, NodeRecord]:
        """Load by node id as of now; a member whose first record has not arrived yet is missing."""
        return self.core.records(asyncio.get_running_loop().time())

    def record(self, node_id: str) -> NodeRecord | None:
        """Load of one node as of now."""
        return self.core.record(asyncio.get_running_loop().time(), node_id)

    @property
    def table(self) -> tuple[list[str], Rows]:
        """The load of this node's own cell as arrays, by node key; see ClusterView.table."""
        return self.core.table(asyncio.get_running_loop().time())

    def elsewhere(self, rng: Rng) -> list[Member]:
        """Members of other cells whose load this node asks for: see sched/gossip/other_cells.py."""
        return self.core.elsewhere(asyncio.get_running_loop().time(), rng)

    @property
    def counters(self) -> dict[str, int]:
        """For metrics: suspicions, refutations, failed_probes, pauses, dropped_<why> ..."""
        dropped = {f"dropped_{why.replace(' ', '_')}": count for why, count in self._guard.dropped.items()}
        return self.core.counters | dropped | {"suspicions": self._suspicions}

    @property
    def core(self) -> GossipCore:
        """Raises RuntimeError before `start`."""
        if self._core is None:
            raise RuntimeError("gossip is not running: await start(host, port) first")
        return self._core

    # --- callbacks and reports

    def on_up(self, callback: Callable[[Member], None]) -> None:
        """Called in the loop for every other node that joins or returns."""
        self._on_up.append(callback)

    def on_down(self, callback: Callable[[Member, str], None]) -> None:
        """Called in the loop with the reason for every node that died, left or was restarted."""
        self._on_down.append(callback)

    def on_suspected(self, callback: Callable[[str], None]) -> None:
        """Called in the loop with the id of a node that may be dead, before this is confirmed."""
        self._on_suspected.append(callback)

    def suspect(self, node_id: str) -> None:
        """The connection to `node_id` broke: it must prove that it is alive. Unknown nodes are ignored."""
        self._handle(Suspect(node_id))

    def cached(self, block_key: bytes, held: bool) -> None:
        """This node's cache has added or dropped a block; the digest tells the other nodes."""
        own = self.core.digests.own
        (own.add if held else own.discard)(key64(block_key))

    # --- the shell

    def _tick(self) -> None:
        """Feed a Tick; `_handle` sets the timer again. After a failed Tick, `Restarts` decides about a retry."""
        self._timer = None
        try:
            self._handle(Tick())
        except Exception as error:
            loop = asyncio.get_running_loop()
            pause_s = self._restarts.failed(loop.time())
            tell("gossip", error, pause_s)
            if pause_s is not None and self._transport is not None:
                self._due = loop.time() + pause_s
                self._timer = loop.call_at(self._due, self._tick)

    def _arm(self, now: float) -> None:
        """Schedule the next Tick for its due time, at least one millisecond from now."""
        due = max(self.core.wake_at(), now + 0.001)
        if self._timer is not None and self._due <= due:
            return  # an early Tick is harmless, and cheaper than a timer per datagram
        if self._timer is not None:
            self._timer.cancel()
        self._due = due  # stored: uvloop's handle does not report a time that has passed
        self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _received(self, payload: bytes, source: Address) -> None:
        self._count("received", payload)
        if (packet := self._guard.incoming(payload, source)) is None:
            return
        if self._core is None:  # a node that starts again has a port to which others still send
            self._guard.dropped["early"] += 1
            return
        try:
            self._handle(Datagram(source, packet))
        except Exception as error:  # a sender must not be able to stop the gossip or fill the log
            self._guard.dropped["failed"] += 1
            if self._complaints.failed(asyncio.get_running_loop().time()) is not None:
                tell("gossip packet", error, 0.0)

    def _handle(self, event: Event) -> None:
        now = asyncio.get_running_loop().time()
        for effect in self.core.handle(now, event):
            self._carry_out(effect)
        if self._transport is not None:
            self._arm(now)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendPacket(address, payload):
                if self._transport is not None:
                    sealed = self._guard.outgoing(payload)
                    self._count("sent", sealed)
                    self._transport.sendto(sealed, address)
            case MemberUp(member):
                log.info("%s is up at %s:%d (%s)", member.node_id, *member.address, ",".join(member.roles))
                self._call(self._on_up, member)
            case MemberDown(member, reason):
                log.info("%s is down: %s", member.node_id, reason)
                self.lost[reason.partition(":")[0]] += 1
                self._call(self._on_down, member, reason)
            case MemberSuspected(node_id):
                self._suspicions += 1
                self._call(self._on_suspected, node_id)
            case Joined():
                self._joined(None)
            case Refused(node_id, reason) if node_id == self._me.node_id:
                self._joined(JoinRefused(reason))
            case Refused(node_id, reason):
                log.warning("refused to let %s join: %s", node_id, reason)

    def _count(self, way: str, payload: bytes) -> None:
        packets, size = self.traffic[way]
        self.traffic[way] = packets + 1, size + len(payload)

    def _joined(self, error: Exception | None) -> None:
        if self._joining is None or self._joining.done():
            return
        if error is None:
            self._joining.set_result(None)
        else:
            self._joining.set_exception(error)

    def _call(self, callbacks: list[Callable[..., None]], *arguments: Any) -> None:
        """A failing callback is a bug of its owner and must not stop the gossip."""
        for callback in callbacks:
            try:
                callback(*arguments)
            except Exception:
                log.exception("membership callback failed")


class _Socket(asyncio.DatagramProtocol):
    """Passes datagrams on. error_received gets ICMP errors of dead peers; the failure detector handles dead peers."""

    def __init__(self, received: Callable[[bytes, Address], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self._received(data, addr[:2])

    def error_received(self, exc: Exception) -> None:
        log.debug("UDP error: %s", exc)
