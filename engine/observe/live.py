"""The data of the live page and of `mooncake.py top`: the reports and histories of all nodes.

No node keeps the state of the cluster. The asked node gathers it from the others over the control channel. A node that
does not answer in time appears without figures, so it does not delay the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from engine.observe.history import INTERVAL_S, KEPT, History, number
from engine.observe.merged import merged
from net.channel.channel import Channel
from net.errors import PeerLost, PeerRefused, RemoteError
from net.loop.tasks import awaited

LIVE, TIMELINE, HISTORY = "live", "timeline", "history"
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
        history: History,
        others: Callable[[], list[Json]] = list,
    ) -> None:
        """own: this node's report; timeline: of a request that this node accepted; members: rows with at least node_id
        and status, as in GET /cluster; others: rows of workers that are no members (engine/backends/fleet.py)."""
        self._channel = channel
        self._own = own
        self._timeline = timeline
        self._members = members
        self._history = history
        self._others = others
        self._latest: asyncio.Task[Json] | None = None
        self._asked = 0.0
        channel.handle(LIVE, self._on_live)
        channel.handle(TIMELINE, self._on_timeline)
        channel.handle(HISTORY, self._on_history)

    async def cluster(self) -> Json:
        """{"unix_s", "node_id", "nodes": [member | its report or {"error": reason}]}"""
        now = time.monotonic()
        if self._latest is None or now - self._asked > FRESH_S:
            self._asked = now
            self._latest = awaited(self._gather())
        return await asyncio.shield(self._latest)

    async def history(self, after: int) -> Json:
        """The last minutes of the cluster (engine/observe/merged.py), intervals with a number above `after`; also
        {"unix_s", "interval_s", "kept": intervals that a node keeps, "silent": nodes that did not answer}."""
        after = max(after, number(time.time()) - KEPT - 1)
        members = [member["node_id"] for member in self._members()]
        answers = await asyncio.gather(*(self._ask(node_id, HISTORY, {"after": after}) for node_id in members))
        known = [answer for answer in answers if "error" not in answer]
        added = await asyncio.to_thread(merged, known)  # of many nodes it would hold up the tokens
        silent = [node_id for node_id, answer in zip(members, answers, strict=True) if "error" in answer]
        return added | {"unix_s": time.time(), "interval_s": INTERVAL_S, "kept": KEPT, "silent": silent}

    async def timeline(self, request_id: str) -> Json | None:
        """The timeline from the node that accepted the request: of requests with the same id the newest one. None if no
        answering node knows the id."""
        others = [m["node_id"] for m in self._members() if m["node_id"] != self._channel.node_id]
        answers = await asyncio.gather(*(self._ask(other, TIMELINE, {"id": request_id}) for other in others))
        found = [self._timeline(request_id), *(answer.get("timeline") for answer in answers)]
        return max((one for one in found if one is not None), key=_accepted, default=None)

    async def _gather(self) -> Json:
        members = self._members()
        answers = await asyncio.gather(*(self._ask(member["node_id"], LIVE, {}) for member in members))
        nodes = [member | answer for member, answer in zip(members, answers, strict=True)]
        return {"unix_s": time.time(), "node_id": self._channel.node_id, "nodes": nodes + self._others()}

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

    async def _on_history(self, peer_id: str, body: Json, data: memoryview) -> Json:
        return self._history.since(body["after"])


def _accepted(timeline: Json) -> float:
    """Unix seconds on the clock of the acceptor."""
    accepted: float = next(event["t"] for event in timeline["events"] if event["event"] == "accepted")
    return accepted
