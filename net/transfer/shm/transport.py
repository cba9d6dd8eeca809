"""Shared-memory transport: on one host, a transfer is a memory copy by the submitter; the other side does nothing.

Two nodes are on one host if their boot ids are equal and one can reach the socket that the other offers. Over that
socket, the submitter gets the memfd of a region at the region's first use, and maps it.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from net.channel.links import Links
from net.errors import PeerLost, TransferError
from net.transfer.common.copying import INLINE_MAX, TURNS_MAX, Copier, Copy, copy_now
from net.transfer.common.holds import Hold, Holds
from net.transfer.common.landed import LandedSpans
from net.transfer.common.memory import Region
from net.transfer.common.spans import Run, Span, check, total
from net.transfer.common.transport import BULK, Op, Unusable
from net.transfer.shm.lifeline import Lifeline, Listener, connect
from net.transfer.shm.server import NONCE_BYTES, Exported, proof

POPULATE_MIN = 64 << 10  # bytes: below this, a system call costs as much as it saves
ANSWER_S = 5.0  # for an answer on the lifeline
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """Equal in all processes of one host, also in containers. Raises OSError if the kernel hides it."""
    return BOOT_ID.read_text().strip()


class Shm:
    """Works between processes of one user that see one file system."""

    name = "shm"

    def __init__(self, links: Links, regions: Mapping[str, Region]) -> None:
        self._links = links
        self._exported = Exported(regions, links.admits)
        self._attached: dict[str, _Attached] = {}
        self._copier = Copier()
        self._token = secrets.token_hex(16)
        self._listener: Listener | None = None

    def offer(self) -> dict[str, Any]:
        try:
            boot = boot_id()
            if self._listener is None:
                self._listener = Listener(lambda sock: self._exported.accept(sock, self._token))
        except OSError as error:
            return {"refused": f"it cannot offer its memory: {error}"}
        return {"boot": boot, "path": self._listener.path, "token": self._token}

    async def open(self, peer_id: str, offer: dict[str, Any]) -> str:
        if peer_id not in self._attached:
            attached = _Attached(peer_id, _reach(offer), self._lost)
            self._attached[peer_id] = attached
            try:
                await attached.greet(self._links.node_id, offer["token"])
            except TransferError as error:
                self._attached.pop(peer_id, None)
                attached.leave()
                raise Unusable(str(error)) from None
            except BaseException:
                self._attached.pop(peer_id, None)
                attached.leave()
                raise
        return "same host, its memory is mapped here"

    def is_open(self, peer_id: str) -> bool:
        attached = self._attached.get(peer_id)
        if attached is not None:
            attached.lifeline.poll()
        return peer_id in self._attached

    def maps(self, peer_id: str) -> bool:
        return peer_id in self._attached

    async def submit(
        self,
        peer_id: str,
        op: Op,
        local: Region,
        remote: str,
        spans: Sequence[Span],
        priority: int = BULK,
        landed: LandedSpans | None = None,
    ) -> None:
        """Called after `is_open`, which has handled the peer's notices."""
        attached = self._attached.get(peer_id)
        if attached is None:
            raise PeerLost(f"the shared memory of {peer_id!r} is gone")
        region = attached.regions.get(remote)
        if region is None:
            region = await attached.region(remote)
        attached.check_usable(region, local)
        check([(offset, length) for _, offset, length in spans], remote, region.nbytes)
        nbytes = total(spans)
        stopped = False
        if op is Op.WRITE and (new := attached.unmapped(region, spans)):
            if nbytes <= TURNS_MAX:
                _populate(region, new)
            else:
                hold = region.memory[:0]  # the mapping stays while the thread works on it, also when this is cancelled
                await asyncio.to_thread(_populate, region, new, hold)
                attached.check_usable(region, local)
        if nbytes <= INLINE_MAX:
            copy_now(op, local, region, spans)
            if landed is not None:
                landed.add(spans)
        else:
            copy = Copy(op, local, region, spans, landed)
            attached.copies.add(copy)
            try:
                await self._copier.copy(copy, nbytes, priority > BULK)
            finally:
                attached.finished(copy)
            stopped = copy.stopped
        if op is Op.WRITE:
            attached.lifeline.poll()  # a WRITE into the memory of a dead process has not landed
        if stopped or attached.lifeline.ended:
            raise PeerLost(f"lost {peer_id!r} during a transfer: {self._links.why_lost(peer_id)}")

    def hold(self, peer_id: str) -> Hold | None:
        attached = self._attached.get(peer_id)
        return None if attached is None else attached.holds.take()

    async def mapped(self, peer_id: str, remote: str) -> Region:
        attached = self._attached.get(peer_id)
        if attached is None:
            raise PeerLost(f"the shared memory of {peer_id!r} is gone")
        region = await attached.region(remote)
        attached.check_usable(region)
        return region

    def rails(self, peer_id: str) -> list[dict[str, Any]]:
        return []

    def withdraw(self, name: str) -> None:
        self._exported.withdraw(name)

    def drop(self, peer_id: str) -> None:
        if (attached := self._attached.pop(peer_id, None)) is not None:
            attached.leave()
        self._exported.hang_up(peer_id)

    async def fence(self, peer_id: str) -> None:
        await self._exported.fence(peer_id)

    async def close(self) -> None:
        for attached in list(self._attached.values()):
            attached.lifeline.send({"bye": True})
            attached.leave()
        self._attached.clear()
        self._exported.close()
        if self._listener is not None:
            self._listener.close()
        self._copier.close()

    def _lost(self, attached: _Attached, in_order: bool) -> None:
        if self._attached.get(attached.peer_id) is attached:
            del self._attached[attached.peer_id]
        attached.leave()
        if not in_order:
            self._links.drop(attached.peer_id, "its process no longer shares memory")


def _reach(offer: dict[str, Any]) -> socket.socket:
    """Connect to the peer's socket. Raises Unusable with the reason."""
    if "refused" in offer:
        raise Unusable(str(offer["refused"]))
    try:
        if boot_id() != offer["boot"]:
            raise Unusable("it runs on another host")
        return connect(offer["path"])
    except OSError as error:
        raise Unusable(f"same host, but its socket is unreachable (another container or user?): {error}") from None


def _populate(region: Region, places: Sequence[Run], hold: memoryview | None = None) -> None:
    for offset, nbytes in places:
        region.populate(offset, nbytes)
    if hold is not None:
        hold.release()


class _Attached:
    """A peer's memory in this process."""

    def __init__(self, peer_id: str, sock: socket.socket, on_lost: Callable[[_Attached, bool], None]) -> None:
        self.peer_id = peer_id
        self.copies: set[Copy] = set()
        self.regions: dict[str, Region] = {}
        self._written: dict[str, set[int]] = {}  # written offsets by region
        self._asked: dict[str, asyncio.Future[Region | None]] = {}  # "" is the greeting
        self._token = self._challenge = ""
        self._leaving = False
        self._bye = False
        self.lifeline = Lifeline(
            sock,
            lambda _, message, memfd: self._message(message, memfd),
            lambda _: on_lost(self, self._bye),  # which calls `leave`
        )
        self.holds = Holds(self.lifeline.has_news, self._close_if_idle)

    async def greet(self, node_id: str, token: str) -> None:
        """Raises TransferError if the peer does not know the token or does not answer."""
        ours = secrets.token_hex(NONCE_BYTES)
        self._token, self._challenge = token, ours
        await self._ask("", {"node": node_id, "nonce": ours})

    async def region(self, name: str) -> Region:
        """The peer's region, mapped on first use. Raises TransferError with the peer's reason."""
        region = self.regions.get(name)
        if region is None:
            region = await self._ask(name, {"region": name})
            assert region is not None
        return region

    def check_usable(self, region: Region, local: Region | None = None) -> None:
        """Called after every wait: the peer may be lost, so that its regions here are closed and its fence has passed,
        or it may have withdrawn this region. Raises PeerLost, TransferError."""
        self.lifeline.poll()
        if self._leaving or self.lifeline.ended:
            raise PeerLost(f"lost {self.peer_id!r} during a transfer")
        if region.closed:
            raise TransferError(f"region {region.name!r} was unregistered there")
        if local is not None and local.closed:
            raise TransferError(f"region {local.name!r} is not registered here")

    def unmapped(self, region: Region, spans: Sequence[Span]) -> list[Run]:
        """Runs that are written for the first time, without small ones: their pages are not mapped into this process
        yet."""
        known = self._written.setdefault(region.name, set())
        new = [(offset, length) for _, offset, length in spans if length >= POPULATE_MIN and offset not in known]
        known.update(offset for offset, _ in new)
        return new

    async def _ask(self, name: str, question: dict[str, Any]) -> Region | None:
        answer = self._asked.get(name)
        if answer is None:
            answer = self._asked[name] = asyncio.get_running_loop().create_future()
            if not self.lifeline.send(question):
                self.lifeline.finish()  # `leave` fails the answer
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise TransferError(f"{self.peer_id!r} does not answer on its lifeline within {ANSWER_S:g} s") from None

    def _message(self, message: dict[str, Any], memfd: int | None) -> None:
        if "gone" in message:
            self._forget(message["gone"])
        elif "bye" in message:
            self._bye = True
        elif "nonce" in message and memfd is None:
            self._prove(message)
        elif (answer := self._asked.pop(message.get("region", ""), None)) is not None and not answer.done():
            self._answered(answer, message, memfd)
        elif memfd is not None:
            os.close(memfd)

    def _prove(self, message: dict[str, Any]) -> None:
        """Check that the owner of the socket knows the token; then prove that we know it."""
        theirs = str(message["nonce"])
        if hmac.compare_digest(str(message.get("proof")), proof(self._token, "owner", self._challenge, theirs)):
            self.lifeline.send({"proof": proof(self._token, "guest", self._challenge, theirs)})
        else:
            self._message({"refused": "same host, but its socket belongs to another process"}, None)

    def _answered(self, answer: asyncio.Future[Region | None], message: dict[str, Any], memfd: int | None) -> None:
        if "refused" in message:
            answer.set_exception(TransferError(message["refused"]))
            answer.exception()  # the asking task may have given up
        elif memfd is None:
            answer.set_result(None)
        else:
            try:
                region = Region.attach(message["region"], memfd, message["nbytes"])
            except (OSError, ValueError) as error:
                answer.set_exception(TransferError(f"region {message['region']!r} cannot be mapped: {error}"))
                answer.exception()
                return
            self._forget(region.name)
            self.regions[region.name] = region
            answer.set_result(region)

    def _forget(self, name: str) -> None:
        self._written.pop(name, None)
        if (region := self.regions.pop(name, None)) is not None:
            region.close()

    def finished(self, copy: Copy) -> None:
        self.copies.discard(copy)
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._leaving and not self.copies and not self.holds:
            self.lifeline.close()

    def leave(self) -> None:
        """Stop copying. When the last copy has stopped, the lifeline is closed; the peer's fence waits for this."""
        self._leaving = True
        self.holds.end()
        for copy in self.copies:
            copy.stop()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(PeerLost(f"lost {self.peer_id!r}"))
                answer.exception()
        self._asked.clear()
        for name in list(self.regions):
            self._forget(name)
        self._close_if_idle()
