"""The data of the live page and of `mooncake.py top`: the current report of every node, gathered by the asked node.

No node keeps the state of the cluster. The asked node asks the others over the control channel. A node that does not
answer in time appears without figures, so it does not delay the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from net.channel.channel import Channel
from net.errors import PeerLost, PeerRefused, RemoteError
from net.loop.tasks import awaited

LIVE, TIMELINE = "live", "timeline"
ANSWER_TIMEOUT_S = 1.0
FRESH_S = 0.5
"""Requests within this time share one answer."""

Json = dict[str, Any]


class Live:
    """The current state of the cluster, and the timeline of any request, from any node."""

    def __init__(
        self,
        channel: Channel,
        own: Callable[[], Json],
        timeline: Callable[[str], Json | None],
        members: Callable[[], list[Json]],
    ) -> None:
        """own: this node's report; timeline: of a request that this node accepted; members: rows with at least node_id
        and status, as in GET /cluster."""
        self._channel = channel
        self._own = own
        self._timeline = timeline
        self._members = members
        self._latest: asyncio.Task[Json] | None = None
        self._asked = 0.0
        channel.handle(LIVE, self._on_live)
        channel.handle(TIMELINE, self._on_timeline)

    async def cluster(self) -> Json:
        """{"unix_s", "node_id", "nodes": [member | its report or {"error": reason}]}"""
        now = time.monotonic()
        if self._latest is None or now - self._asked > FRESH_S:
            self._asked = now
            self._latest = awaited(self._gather())
        return await asyncio.shield(self._latest)

    async def timeline(self, request_id: str) -> Json | None:
        """The timeline from the node that accepted the request; None if no answering node knows the request."""
        own = self._timeline(request_id)
        if own is not None:
            return own
        others = [m["node_id"] for m in self._members() if m["node_id"] != self._channel.node_id]
        answers = await asyncio.gather(*(self._ask(other, TIMELINE, {"id": request_id}) for other in others))
        return next((answer["timeline"] for answer in answers if answer.get("timeline")), None)

    async def _gather(self) -> Json:
        members = self._members()
        answers = await asyncio.gather(*(self._ask(member["node_id"], LIVE, {}) for member in members))
        nodes = [member | answer for member, answer in zip(members, answers, strict=True)]
        return {"unix_s": time.time(), "node_id": self._channel.node_id, "nodes": nodes}

    async def _ask(self, node_id: str, kind: str, body: Json) -> Json:
        try:
            answer, _ = await self._channel.call(node_id, kind, body, timeout_s=ANSWER_TIMEOUT_S)
        except (PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            return {"error": str(error)}
        return dict(answer)

    async def _on_live(self, peer_id: str, body: Json, data: memoryview) -> Json:
        return self._own()

    async def _on_timeline(self, peer_id: str, body: Json, data: memoryview) -> Json:
        return {"timeline": self._timeline(body["id"])}
