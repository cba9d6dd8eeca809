"""Leaves without dropping a request: POST /drain, `mooncake.py drain`, and SIGTERM.

1. Its record contains DRAINING and /health answers 503, so no node places work here and load balancers avoid it. After
   POST /drain, it still accepts requests and places them on other nodes, for at least `grace_s` seconds and until it
   computes nothing any more.
2. It accepts no more requests and finishes those of its own clients. SIGTERM begins here.
3. It finishes its work for other nodes. After the deadline, the acceptors of unfinished requests place them again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from engine.config.config import Config
from engine.node.parts import Serving
from engine.sites.members import mates
from net.gossip.driver import Gossip
from net.http.common.frontend import Refused
from sched.gossip.load_word import CLOSED
from sched.membership.member import Status

log = logging.getLogger("mooncake.node")

POLL_S = 0.02


class Leaving:
    """The end of one node's life, until `Node.stop`."""

    def __init__(self, config: Config, gossip: Gossip, serving: Serving) -> None:
        self.asked = asyncio.Event()
        self._node_id, self._roles, self._gossip, self._serving = config.node_id, config.roles, gossip, serving
        self._timeout_s = config.drain_timeout_ms / 1000
        self._grace_s = 0.0
        self._deadline: float | None = None  # time.monotonic(), set by `run`

    def ask(self, timeout_s: float | None, grace_s: float, force: bool) -> None:
        """Make this node leave; idempotent. Raises Refused for the last node of a role, at its site, unless
        `force`."""
        if self.asked.is_set():
            return
        if not force and (role := self._sole_role()) is not None:
            where = f"site {site}" if (site := self._gossip.me.site) else "the cluster"
            raise Refused(
                f"no other node of {where} has role {role}: requests would be refused; start one, or force it"
            )
        self._timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._grace_s = grace_s
        self.asked.set()

    @property
    def begun(self) -> bool:
        """Whether this node leaves, or was asked to."""
        return self.asked.is_set() or self._deadline is not None

    async def run(self) -> None:
        """Returns when all work is done or the deadline has passed. If cancelled, it fails the unfinished requests of
        its clients."""
        serving = self._serving
        serving.unready = serving.lost or "shutting down"
        self._deadline = time.monotonic() + self._timeout_s
        if serving.engine is not None:
            serving.engine.load.draining = True
        try:
            if self.asked.is_set():
                graceful = min(time.monotonic() + self._grace_s, self._deadline)
                await self._until_idle(graceful)
        except asyncio.CancelledError:
            await self._finish_own(0.0)
            raise
        await self._finish_own(self._left_s())
        await self._until_idle(0.0)
        if owed := self._serving.computing:
            log.warning("%d requests of other nodes are unfinished; their acceptors will place them again", owed)

    def progress(self) -> dict[str, Any]:
        """GET /drain: the remaining work; left_s is None unless the node is leaving."""
        return {
            "node_id": self._node_id,
            "draining": self.begun,
            "accepted": self._serving.accepted,
            "computing": self._serving.computing,
            "left_s": None if self._deadline is None else self._left_s(),
        }

    async def _until_idle(self, earliest: float) -> None:
        """Wait until this node computes no request, at least until `earliest`, at most until the deadline."""
        while self._left_s() > 0 and (time.monotonic() < earliest or self._serving.computing):  # noqa: ASYNC110 - once in its life
            await asyncio.sleep(POLL_S)

    def _left_s(self) -> float:
        return 0.0 if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def _finish_own(self, timeout_s: float) -> None:
        """Accept no more requests and finish those of our own clients, for at most `timeout_s` seconds."""
        if self._serving.acceptor is not None:
            await self._serving.acceptor.drain(timeout_s)

    def _sole_role(self) -> str | None:
        """A role that no other node of this site has: a site that lacks one takes no request."""
        gossip, me = self._gossip, self._node_id
        records = gossip.records
        staying = [
            member
            for member in mates(gossip)
            if member.status is Status.ALIVE
            and member.node_id != me
            and member.node_id in records
            and records[member.node_id].blocks_total
            and not records[member.node_id].flags & CLOSED
        ]
        mine = [role for role in self._roles if role in ("prefill", "decode")]
        return next((role for role in mine if not any(role in member.roles for member in staying)), None)
