"""Finds the transport to a peer: asks which transports the peer offers, and answers the same question of peers.

A peer that was paused or cut off may not know that this node has given it up. Two rules keep its writes out of memory
that has since been reused: it gets no new path to this node's memory before it has asked for offers again, and the
answer contains the epoch, to which a WRITE can be bound.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from net.bodies import Nothing, answered, encode, typed
from net.channel.channel import Channel
from net.errors import RemoteError, TransferError
from net.transfer.common.path import Path
from net.transfer.common.transport import Transport, Unusable

OPEN = "transfer.open"  # by which transports can you be reached?
ANSWER_S = 10.0  # for the peer's offers


@dataclass(frozen=True, slots=True)
class Offers:
    """The answer to OPEN."""

    offers: dict[str, dict[str, Any]]  # by transport, in the transport's form: Transport.offer
    epoch: str  # PathFinder.epoch_of


class PathFinder:
    """Both ends of the question, for one node. `transports`: in the order in which they are tried."""

    def __init__(self, channel: Channel, transports: Mapping[str, Transport]) -> None:
        self.closed = False
        self._channel = channel
        self._transports = transports
        self._epochs: dict[str, str] = {}  # by peer
        self._admitted: set[str] = set()  # peers that have asked since they were last lost
        channel.links.admit_only(self._admitted)
        channel.handle(OPEN, typed(Nothing, self._offer))

    def epoch_of(self, peer_id: str) -> str:
        """Identifies the time since this node last lost the peer. Writes that were granted in an earlier epoch must not
        land any more."""
        return self._epochs.setdefault(peer_id, secrets.token_hex(8))

    def lost(self, peer_id: str) -> None:
        """Begin a new epoch. All connections for transfers from this peer are already cut."""
        self._epochs.pop(peer_id, None)
        self._admitted.discard(peer_id)

    async def find(self, peer_id: str) -> Path:
        """The path over the first transport that works. Raises PeerLost, PeerRefused, TransferError if none works,
        TimeoutError."""
        try:
            reply, _ = await self._channel.call(peer_id, OPEN, encode(Nothing()), timeout_s=ANSWER_S)
            answer = answered(Offers, reply)
        except RemoteError as error:
            raise TransferError(f"{peer_id!r} does not take part in transfers: {error}") from None
        refused: dict[str, str] = {}
        for name, transport in self._transports.items():
            offer = answer.offers.get(name)
            if offer is None:
                refused[name] = "the peer does not offer it"
                continue
            try:
                return Path(name, await transport.open(peer_id, offer), refused, answer.epoch)
            except Unusable as error:
                refused[name] = str(error)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise TransferError(f"no transport to {peer_id!r}: {reasons}")

    async def _offer(self, peer_id: str, body: Nothing, data: memoryview) -> Offers:
        if self.closed:
            raise RemoteError("its transfer engine is closed", "closed")
        self._admitted.add(peer_id)
        offers = {name: transport.offer() for name, transport in self._transports.items()}
        return Offers(offers, self.epoch_of(peer_id))
