"""SignsOfLife: asks the nodes for which this one waits whether they live, and suspects those that do not answer.

sched/membership/quiet.py decides; this asks over the control channel, on which streams come. A node answers in its
event loop, however long its engine computes.

    alive{}  ──>  <── {}
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Set
from functools import partial
from typing import Any

from net.channel.channel import Channel
from net.channel.wire import Frame
from net.errors import PeerLost, PeerRefused, RemoteError
from net.loop.tasks import spawn
from sched.membership.quiet import PERIOD_S, Quiet

ALIVE = "alive"


class SignsOfLife:
    """Of the nodes that `awaited()` names, as long as it names some; `suspect(node)` makes gossip doubt one."""

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
