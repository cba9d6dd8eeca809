"""Sessions: what the KV of a conversation or an agent does between two turns that this acceptor answers.

The client names the session (X-Session-Id). Of every turn the acceptor sees the begin and the end, so it learns the
gaps (sched/sessions/gaps.py). At the end of a turn it chooses a way for the session's KV (sched/sessions/parking.py),
and tells the homes of the pooled blocks, which move them (cache/sessions/). A turn that begins needs no message: its
prefill node reads the blocks, and that ends their parking. Another acceptor knows nothing of the session, and predicts
its returns from all others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from cache.block import BlockKey
from cache.keys import keys_in_parts
from cache.sessions.parked import PARKED_AT_ONCE
from engine.step.request import Request
from net.loop.tasks import spawn
from net.metrics.events import Metrics
from sched.sessions.gaps import Gaps
from sched.sessions.parking import Parking, ParkingRules, choose

PUBLISHED_S = 1.0
"""After the end of a turn, its last blocks are at their homes within this time. A session that returns sooner is not
parked at all."""

Park = Callable[[Sequence[BlockKey], int, Parking], None]


def session_number(root: BlockKey, name: str) -> int:
    """The session called `name` of the tenant with these keys, as homes know it: they do not learn the name."""
    return int.from_bytes(blake2b(root + name.encode(), digest_size=7).digest(), "little")


class Turn(Protocol):
    """A request, such as an engine.front.flight.Flight; `session` is None if it belongs to none."""

    session: int | None

    def as_request(self) -> Request: ...


class Sessions:
    """Of one acceptor. `park(keys, session, parking)` tells the homes, a part of the keys at a time; `block_size`:
    tokens per pooled block."""

    def __init__(self, rules: ParkingRules, block_size: int, park: Park, metrics: Metrics) -> None:
        self._rules, self._block_size, self._park, self._metrics = rules, block_size, park, metrics
        self._gaps = Gaps()
        self._open: Counter[int] = Counter()  # requests of each session under way: agents send several at a time
        self._ends: dict[int, asyncio.TimerHandle | asyncio.Task[None]] = {}  # of sessions whose homes will hear of it

    def __len__(self) -> int:
        return len(self._gaps)

    def begun(self, turn: Turn) -> None:
        """A request was accepted."""
        if turn.session is not None:
            self._cancel(turn.session)
            self._open[turn.session] += 1
            self._gaps.arrived(asyncio.get_running_loop().time(), turn.session)

    def over(self, turn: Turn, answered: bool = True) -> None:
        """The request has ended. With others of its session under way, the turn goes on. One that was not answered,
        such as one whose client left, ends no turn: the client may send it again."""
        if turn.session is None:
            return
        loop, session = asyncio.get_running_loop(), turn.session
        self._open[session] -= 1
        if self._open[session] > 0:
            return
        del self._open[session]
        if not answered:
            return
        try:
            parking = choose(self._gaps.left(loop.time(), session), self._rules)
        except KeyError:  # others have begun since, and it was forgotten
            return
        self._cancel(session)
        self._ends[session] = loop.call_later(PUBLISHED_S, self._tell, turn, session, parking)

    def close(self) -> None:
        for session in list(self._ends):
            self._cancel(session)

    def _tell(self, turn: Turn, session: int, parking: Parking) -> None:
        self._metrics.count("mooncake:session_turns", way=parking.name)
        self._ends[session] = spawn(self._tell_homes(turn.as_request(), session, parking), "parking a session")

    async def _tell_homes(self, request: Request, session: int, parking: Parking) -> None:
        """In parts, with a turn of the loop between two: the keys of a long session take 10 ms."""
        for keys in keys_in_parts(request.key_root, request.token_ids, self._block_size, PARKED_AT_ONCE):
            self._park(keys, session, parking)
            await asyncio.sleep(0)
        del self._ends[session]

    def _cancel(self, session: int) -> None:
        if (end := self._ends.pop(session, None)) is not None:
            end.cancel()
