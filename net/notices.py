"""Notices: a few bytes for the peer that come after everything a submission has landed.

RDMA sends them as a message of its own queue pairs. Everywhere else they are posts on the control channel, sent once
the submission is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from net.channel import Body, Channel
from net.transport import Notifier, Transport

Listener = Callable[[str, bytes], None]
"""(peer id, content)"""


class Notices:
    """Both ends of them, for one node. `TransferEngine.submit` sends."""

    def __init__(self, channel: Channel, transports: Mapping[str, Transport]) -> None:
        self._channel = channel
        self._transports = transports
        self._listeners: list[Listener] = []
        channel.handle("transfer.notice", self._on_notice)
        for transport in transports.values():
            if isinstance(transport, Notifier):
                transport.on_notice.append(self._tell)

    def listen(self, listener: Listener) -> None:
        """Call back, on the event loop, for every notice of every peer."""
        self._listeners.append(listener)

    async def send(self, peer_id: str, transport: str, content: bytes) -> None:
        """What `transport` has landed at the peer is there before this is. It may come twice when a connection breaks.
        Raises PeerLost."""
        way = self._transports.get(transport)
        if peer_id == self._channel.node_id:
            self._tell(peer_id, 0, content)
        elif isinstance(way, Notifier):
            await way.notify(peer_id, content)
        else:
            self._channel.post(peer_id, "transfer.notice", {}, [content])

    async def _on_notice(self, peer_id: str, body: Body, data: memoryview) -> None:
        self._tell(peer_id, 0, bytes(data))

    def _tell(self, peer_id: str, number: int, content: bytes) -> None:
        """number: only of RDMA's writes with immediate data, which have no content."""
        for listener in self._listeners:
            listener(peer_id, content)
