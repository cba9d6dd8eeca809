"""Taking over a request whose acceptor was lost: its client has come back to this node (engine/serving/orphans.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from engine.serving import messages
from engine.serving.flight import Flight
from engine.serving.messages import prompt_digest
from net.channel import Channel, PeerLost, RemoteError

ASK_S = 2.0


class Adoption:
    """Asks decode nodes. Tokens of an adopted request can arrive before the answer is looked at: they are kept."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._asking = 0
        self._early: dict[str, list[list[Any]]] = {}  # by attempt id

    def keep(self, attempt_id: str, item: list[Any]) -> None:
        """An item of a request that is not known here."""
        if self._asking:
            self._early.setdefault(attempt_id, []).append(item)

    async def adopt(self, flight: Flight, nodes: Sequence[str]) -> bool:
        """Make `flight` go on with the attempt that waits on one of `nodes`; False when none does."""
        digest = prompt_digest(flight.root, flight.token_ids)
        body = {"request_id": flight.request_id, "digest": digest}
        self._asking += 1
        try:
            answers = await asyncio.gather(*(self._ask(node, body) for node in nodes))
            found = [(node, answer) for node, answer in zip(nodes, answers, strict=True) if answer is not None]
            if not found:
                return False
            node, answer = max(found, key=lambda one: len(one[1]["items"]))
            flight.adopted = answer["attempt_id"]
            flight.nodes, flight.watched = {node}, {node}
            flight.timeline.nodes |= {"prefill": node, "decode": node}
            flight.items = asyncio.Queue()
            for item in [*answer["items"], *self._early.pop(flight.attempt_id, [])]:
                flight.items.put_nowait(item)
            return True
        finally:
            self._asking -= 1
            if not self._asking:
                self._early.clear()

    async def _ask(self, node: str, body: dict[str, Any]) -> dict[str, Any] | None:
        try:
            answer, _ = await self._channel.call(node, messages.ADOPT, body, timeout_s=ASK_S)
        except (PeerLost, RemoteError, TimeoutError):
            return None
        return answer
