"""The owner's side of shared-memory regions: gives memfds to peers, tells them which regions are gone, waits for
them."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from net.transfer.common.memory import Region
from net.transfer.shm.lifeline import Lifeline

NONCE_BYTES = 16


def proof(token: str, side: str, guest_nonce: str, owner_nonce: str) -> str:
    """Proof in hex, for one handshake, that `side`, "guest" or "owner", knows the token."""
    return hmac.new(token.encode(), f"{side} {guest_nonce} {owner_nonce}".encode(), "sha256").hexdigest()


class Exported:
    """The lifelines of the peers that map this node's regions."""

    def __init__(self, regions: Mapping[str, Region], admits: Callable[[str], bool] = lambda peer_id: True) -> None:
        """admits: whether a peer may now map the regions."""
        self._regions = regions
        self._admits = admits
        self._strangers: dict[Lifeline, tuple[str, str] | None] = {}  # (node id, the proof expected) once greeted
        self._peers: dict[Lifeline, str] = {}
        self._leaving: dict[Lifeline, str] = {}  # asked to stop, may still be copying
        self._changed: asyncio.Event = asyncio.Event()

    def accept(self, sock: socket.socket, token: str) -> None:
        """Make a lifeline of a new connection. Both sides prove that they know the token, which was sent over
        the control connection (sealed if there is a cluster key) and never over this socket."""
        lifeline = Lifeline(sock, partial(self._message, token), self._ended)
        self._strangers[lifeline] = None

    def withdraw(self, name: str) -> None:
        """Notify all peers that the region `name` is gone. They see this before any later message from this node."""
        for lifeline in list(self._peers):
            self._send(lifeline, {"gone": name})

    def hang_up(self, peer_id: str) -> None:
        """Ask the peer to stop; `fence` waits until it has stopped."""
        for lifeline in [one for one, owner in self._peers.items() if owner == peer_id]:
            self._dismiss(lifeline)

    async def fence(self, peer_id: str) -> None:
        """Return when all lifelines of this peer that were hung up have ended."""
        while peer_id in self._leaving.values():
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        for lifeline in [*self._strangers, *self._peers, *self._leaving]:
            lifeline.send({"bye": True})
            lifeline.close()
        self._strangers.clear()
        self._peers.clear()
        self._leaving.clear()
        self._changed.set()

    def _message(self, token: str, lifeline: Lifeline, message: dict[str, Any], descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)
        if lifeline in self._strangers:
            self._greeted(lifeline, token, message)
        elif "region" in message:
            self._send(lifeline, self._description(name := str(message["region"])), self._memfd(name))

    def _greeted(self, lifeline: Lifeline, token: str, message: dict[str, Any]) -> None:
        expected = self._strangers[lifeline]
        if expected is None and "nonce" in message:
            theirs, ours = str(message["nonce"]), secrets.token_hex(NONCE_BYTES)
            self._strangers[lifeline] = str(message.get("node")), proof(token, "guest", theirs, ours)
            lifeline.send({"nonce": ours, "proof": proof(token, "owner", theirs, ours)})
        elif expected is not None and hmac.compare_digest(str(message.get("proof")), expected[1]):
            if not self._admits(expected[0]):
                lifeline.send({"refused": "same host, but the peer has given up this node"})
                lifeline.hang_up()
                return
            del self._strangers[lifeline]
            self._peers[lifeline] = expected[0]
            self._send(lifeline, {"welcome": True})
        else:
            lifeline.send({"refused": "same host, but its socket belongs to another process"})
            lifeline.hang_up()

    def _description(self, name: str) -> dict[str, Any]:
        region = self._regions.get(name)
        if region is None or region.closed:
            return {"region": name, "refused": f"region {name!r} is not registered there"}
        if region.memfd is None:
            remedy = "make it with Region.shared, or use the transport tcp"
            return {"region": name, "refused": f"region {name!r} is private memory there: {remedy}"}
        return {"region": name, "nbytes": region.nbytes}

    def _memfd(self, name: str) -> int | None:
        region = self._regions.get(name)
        return region.memfd if region is not None else None

    def _send(self, lifeline: Lifeline, message: dict[str, Any], memfd: int | None = None) -> None:
        if not lifeline.send(message, memfd):
            self._dismiss(lifeline)

    def _dismiss(self, lifeline: Lifeline) -> None:
        """Hang up, but wait for the end: only the end proves that the peer has stopped."""
        if lifeline in self._peers:
            self._leaving[lifeline] = self._peers.pop(lifeline)
            lifeline.hang_up()

    def _ended(self, lifeline: Lifeline) -> None:
        lifeline.close()
        self._strangers.pop(lifeline, None)
        self._peers.pop(lifeline, None)
        self._leaving.pop(lifeline, None)
        self._changed.set()
