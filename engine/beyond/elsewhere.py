"""Elsewhere: blocks of requests beyond memory on other nodes, which attend to them when asked (--attention-elsewhere).

    engine thread   store a block  ──> event loop ──> holder      not waited for: the next ask finds out
    engine thread   send queries   ──> event loop ──> holder      then it computes its own parts, and waits for theirs

While a holder is late, steps go on without the request; its answer is kept until the request asks again. A holder that
is lost, or does not answer in time, ends the attempt: the acceptor places the request again, and what no memory has is
computed again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cache.block import BlockGeometry, BlockKey
from engine.beyond import messages
from engine.beyond.held import ERRORS, Done, Heads, HeldBlocks, HeldLease, Link
from engine.beyond.leases import LEASE_S
from engine.beyond.messages import LENDS, LeaseNumbers, Lend, Lent, Offer, Offered
from net.bodies import answered, encode
from net.channel.channel import Channel, RemoteError
from net.metrics.events import Metrics
from sched.elsewhere import Holder, Job, Own, Split, divide
from sched.membership.member import Member, Status

log = logging.getLogger("mooncake.engine")

OFFER_S, LEND_S = 1.0, 10.0
"""Deadlines. A node that is slow to make an offer would be slow to answer asks."""

PROBES, PROBE_BYTES = 4, 1 << 20
"""Of the way to a new holder: tries, of which the fastest counts, and the length of the long one."""


class Refused(Exception):
    """A holder does not lend what it has offered."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node


class NoRoomElsewhere(Exception):
    """No memory has room for all blocks of a request."""

    def __init__(self, lent: int) -> None:
        """lent: blocks that the holders offer."""
        super().__init__(f"other nodes lend {lent} blocks")
        self.lent = lent


class Elsewhere:
    """The asking side of one node. Use it on the event loop."""

    def __init__(
        self,
        geometry: BlockGeometry,
        heads: Heads,
        channel: Channel,
        members: Callable[[], Sequence[Member]],
        metrics: Metrics,
        *,
        always: bool,
    ) -> None:
        """members: of the cluster. always: the holders take as many blocks as they lend."""
        self.geometry, self.heads, self.channel, self.metrics = geometry, heads, channel, metrics
        self.done = Done()
        self._members, self._always = members, always
        self._links: dict[str, Link] = {}
        self._held: set[HeldBlocks] = set()
        self._timer: asyncio.TimerHandle | None = None
        channel.on_lost(self._forget)

    # --- where blocks shall lie

    async def holders(self) -> list[Holder]:
        """The nodes that lend room now."""
        nodes = [
            member.node_id
            for member in self._members()
            if member.status is Status.ALIVE
            and member.node_id != self.channel.node_id
            and member.info.get(LENDS) is True
        ]
        found = await asyncio.gather(*map(self._holder, nodes))
        return [one for one in found if one is not None]

    async def _holder(self, node: str) -> Holder | None:
        try:
            offered = await self._offer(node)
            if node not in self._links:
                self._links[node] = await self._measured(node, offered.bytes_per_s)
        except ERRORS as error:  # it is lost, hangs, or is still starting
            log.info("no blocks on %s: %r", node, error)
            return None
        link = self._links[node]
        return Holder(node, offered.blocks, link.ask_s, link.bytes_per_s, link.link_bytes_per_s)

    async def _offer(self, node: str, sent: bytes = b"", answer_bytes: int = 0) -> Offered:
        reply, _ = await self.channel.call(
            node, messages.OFFER, encode(Offer(answer_bytes)), [sent] if sent else [], timeout_s=OFFER_S
        )
        offered = answered(Offered, reply)
        if not offered.bytes_per_s > 0:
            raise RemoteError(f"{node} attends to {offered.bytes_per_s} bytes/s", "bad_answer")
        return offered

    async def _measured(self, node: str, bytes_per_s: float) -> Link:
        """The way there and back with a query and a part, and with a long message."""

        async def fastest(sent: bytes, answer_bytes: int) -> float:
            taken = list[float]()
            for _ in range(PROBES):
                begin = time.perf_counter()
                await self._offer(node, sent, answer_bytes)
                taken.append(time.perf_counter() - begin)
            return min(taken)

        ask_s = await fastest(bytes(self.heads.query_bytes), self.heads.part_bytes)
        long_s = await fastest(bytes(PROBE_BYTES), 0)
        return Link(ask_s, PROBE_BYTES / max(long_s - ask_s, long_s / 10), bytes_per_s)

    def divide(self, job: Job, own: Own, holders: Sequence[Holder]) -> Split | None:
        """See sched.elsewhere.divide."""
        return divide(job, own, holders, always=self._always)

    async def lodge(self, job: Job, own: Own, keys: Sequence[BlockKey], named: bool) -> tuple[Split, HeldBlocks]:
        """Divide the blocks of a request, whose leading ones have these keys, and lease the room on holders. named:
        whether others may find its blocks. Raises NoRoomElsewhere."""
        without: set[str] = set()
        while True:
            holders = [one for one in await self.holders() if one.node not in without]
            split = self.divide(job, own, holders)
            if split is None:
                raise NoRoomElsewhere(sum(one.blocks for one in holders))
            try:
                return split, await self._lease(split, keys, named)
            except Refused as refused:
                log.info("no blocks on %s", refused)
                without.add(refused.node)

    async def _lease(self, split: Split, keys: Sequence[BlockKey], named: bool) -> HeldBlocks:
        """Raises Refused."""
        leases, begin = list[HeldLease](), 0
        held = HeldBlocks(self, leases, named)
        self._held.add(held)
        self._keep()  # from now on: several holders that are slow to lend may take longer than the first lease lasts
        try:
            for node, blocks in split.held:
                first, number, link = split.near + begin, secrets.randbits(53), self._links.get(node)
                if link is None:
                    raise Refused(node, "it was lost")
                leases.append(HeldLease(node, number, begin, blocks, 0, link))
                try:
                    found = await self._lend(node, Lend(number, blocks), keys[first : first + blocks])
                except ERRORS as error:
                    raise Refused(node, str(error)) from None
                leases[-1] = HeldLease(node, number, begin, blocks, found, link)
                begin += blocks
        except BaseException:
            held.close()
            raise
        return held

    async def _lend(self, node: str, body: Lend, keys: Sequence[BlockKey]) -> int:
        reply, _ = await self.channel.call(
            node, messages.LEND, encode(body), [b"".join(keys)] if keys else [], timeout_s=LEND_S
        )
        return min(answered(Lent, reply).found, len(keys))

    def _forget(self, node: str) -> None:
        """It was lost; if it comes back, the way to it is measured again."""
        self._links.pop(node, None)

    # --- while requests run

    def _keep(self) -> None:
        """Renew all leases now and then: a request may wait for long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            self._post(messages.KEEP, [lease for held in self._held for lease in held.leases])
            self._timer = asyncio.get_running_loop().call_later(LEASE_S / 3, self._keep)

    def _post(self, kind: str, leases: Iterable[HeldLease]) -> None:
        numbers: dict[str, list[int]] = {}
        for lease in leases:
            numbers.setdefault(lease.node, []).append(lease.number)
        for node, of_node in numbers.items():
            self.channel.post(node, kind, encode(LeaseNumbers(of_node)))

    def ended(self, held: HeldBlocks) -> None:
        """Its request needs it no longer."""
        if held in self._held:
            self._held.remove(held)
            self._post(messages.RELEASE, held.leases)

    def fell_back(self, reason: str) -> None:
        """A request lost a holder."""
        self.done.fallbacks += 1
        self.metrics.count("mooncake:attention_fallbacks")
        log.warning("blocks elsewhere are lost, and their request begins again: %s", reason)

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        links = {
            node: {"ask_s": link.ask_s, "bytes_per_s": link.bytes_per_s, "link_bytes_per_s": link.link_bytes_per_s}
            for node, link in self._links.items()
        }
        done = {name: getattr(self.done, name) for name in Done.__slots__}
        return {"leases": sum(len(held.leases) for held in self._held), "holders": links} | done

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for held in list(self._held):
            held.close()
