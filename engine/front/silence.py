"""Handles nodes that fall silent. A network cut breaks no connection, so the requests of such a node would wait some
seconds until gossip declares it dead. When gossip suspects a node and it is silent, the acceptor places its requests
again. If the node is alive after all, its late tokens belong to an attempt that has ended.

A node that this acceptor has asked for a sign of life, and that gave none (`SignsOfLife`), is silent: it has
REFUTATION_S to refute the suspicion. Of any other suspected node, an attempt is given up after SILENCE_S. For an
attempt that has made tokens, this begins with the last one. For an attempt without tokens, which may be in the middle
of a long prompt, and for an unanswered call, it begins with the suspicion.

    alive{}  ──>  <── {}
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any

from engine.front.flight import Flight
from net.channel.channel import Channel
from net.channel.wire import Buffer, Frame
from net.errors import PeerLost, PeerRefused, RemoteError
from net.loop.tasks import spawn
from sched.membership.quiet import PERIOD_S, Quiet

ALIVE = "alive"

SILENCE_S = 1.0
REFUTATION_S = 0.4
"""A live node refutes within a few gossip periods of 0.1 s."""

CHECK_S = 0.1


class Silent(Exception):
    """The asked node is suspected and has not answered. The acceptor can place the request again."""


class Silence:
    """The silent nodes of one acceptor. `suspects(node)`: whether gossip considers it dead or suspects it;
    `late(node)`: whether it has left a question unanswered; `fail(flight, reason)` ends an attempt."""

    def __init__(
        self,
        channel: Channel,
        suspects: Callable[[str], bool],
        flights: Callable[[], Iterable[Flight]],
        fail: Callable[[Flight, str], None],
        late: Callable[[str], bool],
    ) -> None:
        self._channel, self._suspects, self._flights, self._fail = channel, suspects, flights, fail
        self._late = late

    def suspected(self, node: str) -> None:
        """Gossip has begun to suspect the node."""
        self._check_later(node, time.monotonic(), REFUTATION_S)

    def _check_later(self, node: str, since: float, pause_s: float) -> None:
        left_s = since + SILENCE_S - time.monotonic()
        asyncio.get_running_loop().call_later(max(0.0, min(pause_s, left_s)), self._check, node, since)

    def _check(self, node: str, since: float) -> None:
        if not self._suspects(node):
            return
        now, reason, late = time.monotonic(), f"node {node} is suspected and silent", self._late(node)
        over = late or now >= since + SILENCE_S
        for flight in self._flights():
            if flight.asking is not None and flight.asking[0] == node:
                if over:
                    flight.unheard = reason
                    flight.asking[1].cancel()
            elif node in flight.watched and flight.last_token < since:
                heard = flight.last_token if flight.last_token > flight.begun else since
                if late or now >= heard + SILENCE_S:
                    self._fail(flight, reason)
        if not over:
            self._check_later(node, since, CHECK_S)

    async def ask(
        self, flight: Flight, node: str, kind: str, body: dict[str, Any], data: Sequence[Buffer], timeout_s: float
    ) -> dict[str, Any]:
        """Channel.call for the task that owns `flight`. It also raises Silent."""
        task = asyncio.current_task()
        assert task is not None
        flight.asking = node, task
        try:
            return (await self._channel.call(node, kind, body, data, timeout_s))[0]
        except asyncio.CancelledError:
            reason, flight.unheard = flight.unheard, ""
            if not reason or task.uncancel() > 0:  # the client disconnected
                raise
            raise Silent(reason) from None
        finally:
            flight.asking = None


class SignsOfLife:
    """Asks the nodes for which this one waits whether they live, and suspects those that do not answer.

    The nodes are those that `awaited()` names, as long as it names some; `suspect(node)` makes gossip doubt one.
    sched/membership/quiet.py decides. The questions go over the control channel, on which streams come. A node answers
    in its event loop, however long its engine computes."""

    def __init__(self, channel: Channel, awaited: Callable[[], Set[str]], suspect: Callable[[str], None]) -> None:
        self._channel, self._awaited, self._suspect = channel, awaited, suspect
        self._quiet = Quiet()
        self._task: asyncio.Task[None] | None = None
        self.heard = self._quiet.heard
        self.late = self._quiet.late
        channel.handle(ALIVE, _alive)

    def watch(self) -> None:
        """This node waits for others from now on."""
        if self._task is None or self._task.done():
            self._task = spawn(self._look(), "asking nodes for a sign of life")

    def lost(self, node: str) -> None:
        """Its connections are gone, and its question with them."""
        self._quiet.forget(node)

    async def _look(self) -> None:
        while nodes := self._awaited() - {self._channel.node_id}:
            asked, late = self._quiet.look(time.monotonic(), nodes)
            for node in asked:
                self._channel.ask(node, ALIVE, {}).add_done_callback(partial(self._answered, node))
            for node in late:
                self._suspect(node)
            await asyncio.sleep(PERIOD_S)

    def _answered(self, node: str, answer: asyncio.Future[Frame]) -> None:
        try:
            answer.result()
        except (PeerLost, PeerRefused, asyncio.CancelledError):
            self.lost(node)
        except RemoteError:  # of a node that loads its model
            self._quiet.answered(node)
        else:
            self._quiet.answered(node)


async def _alive(peer: str, body: dict[str, Any], data: memoryview) -> None:
    """A node that can say this lives."""
