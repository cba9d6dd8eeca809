"""Links: all TCP connections of one node: the addresses of peers, which side connects, and when a peer counts as lost.

One listening port serves every purpose: "control" messages, and separate "data" connections so that control messages
never wait behind bulk data. If a vital connection breaks, the peer is lost: its other connections are dropped, and
`on_lost` fires once, on both sides if both are alive. If two nodes dial each other at the same moment, both connections
stay; each side sends on the one it saw first, so its messages keep their order.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from net.channel.cluster_key import ClusterKey
from net.channel.connection import Connection, Receiver
from net.channel.doorstep import Doorstep
from net.channel.peer import Address, Peer
from net.channel.sealed_stream import SealedStream
from net.channel.wire import Header
from net.errors import PeerLost, PeerRefused
from net.loop.tasks import spawn

log = logging.getLogger("mooncake.net")

CONNECT_S = 10.0  # TCP connection and hellos
CLOSE_S = 1.0  # to send queued frames when closing
NAME_MAX = 256  # characters of a node's id, instance and host, and of a purpose
ANY_HOST = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Door:
    """What a thread without an event loop needs to open a data connection (net/transfer/tcp/blocking_rail.py)."""

    peer_id: str
    instance: str  # of its process
    address: Address
    greeting: Callable[[str], Header]  # purpose -> this node's hello


class Links:
    """The connections of the node `node_id`. `check` returns a reason to refuse the peer with this hello, or None."""

    def __init__(
        self,
        node_id: str,
        hello: dict[str, Any],
        check: Callable[[dict[str, Any]], str | None],
        cluster_key: ClusterKey | None = None,
    ) -> None:
        self.node_id = node_id
        self.instance = secrets.token_hex(8)
        self.address: Address | None = None
        self._hello = hello
        self._check = check
        self._cluster_key = cluster_key
        self._peers: dict[str, Peer] = {}
        self._acceptors: dict[str, Callable[[Connection], Receiver]] = {}  # by purpose
        self._vital: set[str] = set()
        self._admitted: Container[str] | None = None
        self._everyone: set[Connection] = set()  # including connections in their handshake
        self._doorstep: Doorstep[Connection] = Doorstep()
        self._on_lost: list[Callable[[str], None]] = []
        self._on_closed: list[Callable[[str], None]] = []
        self._server: asyncio.Server | None = None
        self._closing = self._leaving = False

    async def start(self, host: str, port: int = 0) -> Address:
        """Listen. Returns the address sent to peers. Raises OSError if the port is in use."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(partial(Connection, self, self._everyone), host or None, port)
        self.address = (host, self._server.sockets[0].getsockname()[1])
        return self.address

    def accept(self, purpose: str, acceptor: Callable[[Connection], Receiver], vital: bool = True) -> None:
        """`acceptor` returns the receiver of each opened connection of this purpose, dialed by either side. If a
        connection that is not `vital` breaks, only its receiver is notified; the peer is not lost."""
        self._acceptors[purpose] = acceptor
        if vital:
            self._vital.add(purpose)

    def admit_only(self, admitted: Container[str]) -> None:
        """From now on only the peers that `admitted` contains at that time may open connections other than control."""
        self._admitted = admitted

    def admits(self, peer_id: str) -> bool:
        """Whether this peer may now open connections other than control."""
        return self._admitted is None or peer_id in self._admitted

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call back, in order of registration, when a peer's connection broke."""
        self._on_lost.append(callback)

    def on_closed(self, callback: Callable[[str], None]) -> None:
        """Call back when a peer has closed its last control connection in good order."""
        self._on_closed.append(callback)

    def introduce(self, peer_id: str, address: Address) -> None:
        """Set the address at which to dial `peer_id` from now on."""
        self._peer(peer_id).address = (address[0], address[1])

    def hello_of(self, peer_id: str) -> dict[str, Any]:
        """The hello of a peer. Raises KeyError before its first connection."""
        peer = self._peers[peer_id]
        if not peer.instance:
            raise KeyError(peer_id)
        return peer.hello

    async def connect(self, address: Address) -> str:
        """The id of the node listening at `address`. Raises PeerRefused, PeerLost."""
        address = (address[0], address[1])
        if address == self.address:
            return self.node_id
        for peer in self._peers.values():
            if peer.address == address and peer.control() is not None:
                return peer.peer_id
        connection, refused = await self._open(address, "control")
        if refused is not None:
            if connection.instance == self.instance:
                return self.node_id
            raise refused
        self.introduce(connection.peer_id, address)
        return connection.peer_id

    @property
    def sealed(self) -> bool:
        """Whether this node has a cluster key."""
        return self._cluster_key is not None

    @property
    def alone(self) -> bool:
        """Whether no other node is known."""
        return not self._peers

    def control_now(self, peer_id: str) -> Connection | None:
        """The control connection, or None."""
        peer = self._peers.get(peer_id)
        return peer.control() if peer else None

    async def control(self, peer_id: str) -> Connection:
        """The control connection, dialed if necessary. Raises PeerLost, PeerRefused."""
        peer = self._peer(peer_id)
        if (ready := peer.control()) is not None:
            return ready
        if peer.dialing is None:
            peer.dialing = spawn(self._dial_control(peer), "dialing a peer")
        waiter: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        peer.waiters.append(waiter)
        return await waiter

    def door(self, peer_id: str) -> Door | None:
        """How to open one more connection to a peer with an open control connection. None without one, and with a
        cluster key. Any thread may ask."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.address is None or self.sealed or self._closing or peer.control() is None:
            return None
        return Door(peer_id, peer.instance, peer.address, self.greeting)

    async def dial(self, peer_id: str, purpose: str) -> Connection:
        """A new connection to the peer. Raises PeerLost, PeerRefused."""
        peer = self._peer(peer_id)
        if self._closing:
            raise PeerLost("this node is closing")
        if peer.address is None:
            raise PeerLost(f"peer {peer_id!r} has no known address: introduce it first")
        connection, refused = await self._open(peer.address, purpose)
        if refused is not None:
            raise refused
        if connection.peer_id != peer_id:
            if purpose != "control":
                connection.close()
            raise PeerLost(f"the address of {peer_id!r} now belongs to {connection.peer_id!r}")
        return connection

    def drop(self, peer_id: str, reason: str) -> None:
        """Give up the peer: cut all its connections and call `on_lost`. Does nothing if there are no connections."""
        peer = self._peers.get(peer_id)
        if peer is None or not peer.connections:
            return
        log.log(logging.DEBUG if self._leaving else logging.INFO, "%s lost %s: %s", self.node_id, peer_id, reason)
        peer.lost_because = reason
        connections, peer.connections = peer.connections, []
        greeting = [one for one in self._everyone if one.peer_id == peer_id and not (one.dialed or one.is_open)]
        for connection in connections + greeting:
            connection.abort()
        self.report_lost(peer_id)

    def report_lost(self, peer_id: str) -> None:
        _tell(self._on_lost, peer_id)

    def why_lost(self, peer_id: str) -> str:
        peer = self._peers.get(peer_id)
        return peer.lost_because if peer and peer.lost_because else "the connection is closed"

    def leave(self) -> None:
        """The peers know that this node leaves. They cut their connections, which is no news from now on."""
        self._leaving = True

    async def close(self) -> None:
        """Say bye on every connection, stop listening; `on_lost` is not called."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for peer in self._peers.values():
            if peer.dialing is not None:
                peer.dialing.cancel()
            peer.fail(PeerLost("this node is closing"))
            peer.connections.clear()
        ending = list(self._everyone)
        for connection in ending:
            connection.close()
        if ending:
            await asyncio.wait([connection.gone for connection in ending], timeout=CLOSE_S)
        for connection in list(self._everyone):
            connection.abort()
        dialing = [peer.dialing for peer in self._peers.values() if peer.dialing is not None]
        await asyncio.gather(*dialing, return_exceptions=True)
        if self._server is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._server.wait_closed()

    # --- dialing

    def _peer(self, peer_id: str) -> Peer:
        return self._peers.setdefault(peer_id, Peer(peer_id))

    async def _dial_control(self, peer: Peer) -> None:
        try:
            await self.dial(peer.peer_id, "control")
        except (PeerLost, PeerRefused) as error:
            peer.fail(error)
        except Exception as error:
            peer.fail(PeerLost(f"cannot reach {peer.peer_id!r}: {error!r}"))
            raise
        finally:
            peer.dialing = None

    async def _open(self, address: Address, purpose: str) -> tuple[Connection, PeerRefused | None]:
        """A connection after its hellos, or the refusal. Raises PeerLost."""
        connection = Connection(self, self._everyone, purpose)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: connection, *address)
                await connection.ready
        except PeerRefused as refused:
            return connection, refused
        except PeerLost:
            raise
        except OSError as error:  # TimeoutError is one
            reason = str(error) or f"no answer within {CONNECT_S:g} s"
            raise PeerLost(f"cannot reach {address[0]}:{address[1]}: {reason}") from None
        finally:
            if not connection.is_open:
                connection.abort()
        return connection, None

    # --- net.channel.connection.Greeter

    def sealing(self, dialed: bool) -> SealedStream | None:
        key = self._cluster_key
        return None if key is None else SealedStream(key.ring(), dialed, secrets.token_bytes(32))

    def greeting(self, purpose: str) -> Header:
        host, port = self.address or ("", 0)
        return {
            "node": self.node_id,
            "instance": self.instance,
            "purpose": purpose,
            "host": host,
            "port": port,
            "hello": self._hello,
        }

    def judge(self, connection: Connection, hello: Header) -> str | None:
        node, host, port, body = hello.get("node"), hello.get("host"), hello.get("port"), hello.get("hello")
        instance, purpose = hello.get("instance"), hello.get("purpose")
        texts = (node, instance, purpose, host)
        if not all(isinstance(text, str) and len(text) <= NAME_MAX and text.isprintable() for text in texts):
            return "malformed hello"
        if type(port) is not int or not 0 <= port < 1 << 16 or not isinstance(body, dict):
            return "malformed hello"
        connection.peer_id, connection.instance, connection.hello = str(node), str(instance), body
        connection.purpose = str(purpose)
        if port:
            connection.peer_address = (connection.remote_host if host in ANY_HOST else str(host), port)
        if self._closing:
            return "this node is closing"
        if node == self.node_id:
            return "a node does not connect to itself" if instance == self.instance else _taken(self.node_id)
        if purpose not in self._acceptors:
            return f"this node has no {purpose!r} connections"
        if not (connection.dialed or purpose == "control" or self.admits(str(node))):
            return f"this node has given up {node!r}"
        return self._check(body)

    def connected(self, connection: Connection) -> None:
        if (crowded_out := self._doorstep.enter(connection, connection.remote_host)) is not None:
            crowded_out.crowded_out()

    def settled(self, connection: Connection) -> None:
        self._doorstep.leave(connection)

    def opened(self, connection: Connection) -> Receiver:
        peer = self._peer(connection.peer_id)
        restarted = peer.instance not in ("", connection.instance)
        if restarted:
            self.drop(peer.peer_id, "it has restarted")
        if not connection.dialed and (restarted or peer.address is None):
            peer.address = connection.peer_address or peer.address
        peer.instance, peer.hello = connection.instance, connection.hello
        peer.connections.append(connection)
        receiver = self._acceptors[connection.purpose](connection)
        if connection.purpose == "control":
            peer.answer(connection)
        return receiver

    def ended(self, connection: Connection, reason: str | None) -> None:
        peer = self._peer(connection.peer_id)
        if connection not in peer.connections:
            return
        if reason is not None and connection.purpose in self._vital:
            self.drop(peer.peer_id, reason)
            return
        self.left(connection)
        if connection.purpose == "control" and peer.control() is None:
            _tell(self._on_closed, peer.peer_id)

    def left(self, connection: Connection) -> None:
        peer = self._peers.get(connection.peer_id)
        if peer is not None and connection in peer.connections:
            peer.connections.remove(connection)


def _tell(callbacks: list[Callable[[str], None]], peer_id: str) -> None:
    for callback in callbacks:
        try:
            callback(peer_id)
        except Exception:
            log.exception("a callback about peer %s failed", peer_id)


def _taken(node_id: str) -> str:
    return f"the node id {node_id!r} is already taken by another node: choose another one with --node-id"
