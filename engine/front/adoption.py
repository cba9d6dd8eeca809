"""Takes over a request of a lost acceptor when its client reconnects to this node (engine/handoff/orphans.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.front.flight import Flight
from engine.front.moving import Places
from engine.handoff import messages
from engine.handoff.messages import Adopt, Adopted, prompt_digest
from engine.handoff.updates import Update, decode_all
from net.bodies import BodyError, decode, encode
from net.channel.channel import Channel, PeerLost, RemoteError

ANSWER_TIMEOUT_S = 2.0


class Adoption:
    """Asks decode nodes. Tokens of an adopted request may arrive before the answer is processed, so they are kept."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._asking = 0
        self._early: dict[str, list[Update]] = {}  # by attempt id

    def keep(self, attempt_id: str, update: Update) -> None:
        """Keep an update of an unknown request while an adoption is being negotiated."""
        if self._asking:
            self._early.setdefault(attempt_id, []).append(update)

    async def adopt(self, flight: Flight, nodes: Sequence[str]) -> bool:
        """Continue `flight` with the attempt that waits on one of `nodes`. Returns False if none does."""
        question = Adopt(flight.request_id, prompt_digest(flight.root, flight.token_ids), flight.sampling)
        self._asking += 1
        try:
            answers = await asyncio.gather(*(self._ask(node, question) for node in nodes))
            found = [(node, answer) for node, answer in zip(nodes, answers, strict=True) if answer is not None]
            if not found:
                return False
            node, (attempt_id, made, weights) = max(found, key=lambda one: len(one[1][1]))
            flight.adopted, flight.weights = attempt_id, weights
            flight.places = Places({node}, {node})
            flight.timeline.nodes |= {"prefill": node, "decode": node}
            flight.items = asyncio.Queue()
            for update in [*made, *self._early.pop(attempt_id, [])]:
                flight.items.put_nowait(update)
            return True
        finally:
            self._asking -= 1
            if not self._asking:
                self._early.clear()

    async def _ask(self, node: str, question: Adopt) -> tuple[str, list[Update], bytes] | None:
        """Returns (attempt id, its tokens so far, the weights that compute it); None if the node does not keep it."""
        try:
            body, _ = await self._channel.call(node, messages.ADOPT, encode(question), timeout_s=ANSWER_TIMEOUT_S)
            answer = decode(Adopted, body)
            made = [update for _, update in decode_all({"updates": answer.updates})]
            return answer.attempt_id, made, answer.weights
        except (PeerLost, RemoteError, BodyError, TimeoutError):
            return None
