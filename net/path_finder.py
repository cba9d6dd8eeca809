"""Which transport reaches a peer: asks what it offers, and answers peers that ask here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from net.channel import Channel
from net.errors import RemoteError, TransferError
from net.path import Path
from net.transport import Transport, Unusable

ANSWER_S = 10.0  # for the peer to say what it offers


class PathFinder:
    """Both ends, for one node. `transports` are in the order in which they are tried."""

    def __init__(self, channel: Channel, transports: Mapping[str, Transport]) -> None:
        self.closed = False
        self._channel = channel
        self._transports = transports
        channel.handle("transfer.open", self._offer)

    async def find(self, peer_id: str) -> Path:
        """The first transport that works between the two. Raises PeerLost, PeerRefused, TransferError when there is
        none, TimeoutError."""
        try:
            answer, _ = await self._channel.call(peer_id, "transfer.open", {}, timeout_s=ANSWER_S)
        except RemoteError as error:
            raise TransferError(f"{peer_id!r} does not take part in transfers: {error}") from None
        refused: dict[str, str] = {}
        for name, transport in self._transports.items():
            offer = answer["offers"].get(name)
            if offer is None:
                refused[name] = "the peer does not offer it"
                continue
            try:
                return Path(name, await transport.open(peer_id, offer), refused)
            except Unusable as error:
                refused[name] = str(error)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise TransferError(f"no transport to {peer_id!r}: {reasons}")

    async def _offer(self, peer_id: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        if self.closed:
            raise RemoteError("its transfer engine is closed", "closed")
        return {"offers": {name: transport.offer() for name, transport in self._transports.items()}}
