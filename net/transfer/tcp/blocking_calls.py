"""BlockingCalls: bulk calls of threads without an event loop (net/transfer/tcp/blocking_rail.py)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from net.channel.links import Door, Links
from net.errors import PeerLost, PeerRefused, RemoteError
from net.transfer.tcp.blocking_rail import BlockingRail
from net.transfer.tcp.bulk_call import BulkCall

IDLE_MAX = 16  # connections to one peer that are kept between calls: one per thread that asks at the same time
LOOK_AFTER_S = 1.0  # a connection that was idle for longer may have ended, and is looked at before its next question
REST_S = 1.0  # after a failure, a peer is not asked this way

Errors = PeerLost | PeerRefused | RemoteError | TimeoutError
ERRORS = (PeerLost, PeerRefused, RemoteError, TimeoutError)


class BlockingCalls:
    """Any thread may ask. `spin_s`: how long it may look for an answer before it sleeps."""

    def __init__(self, links: Links, spin_s: float) -> None:
        self._links = links
        self._spin_s = spin_s
        self._idle: dict[tuple[str, str], deque[BlockingRail]] = {}  # by peer id and the instance of its process
        self._rest_until: dict[str, float] = {}
        links.on_lost(self._forget)
        links.on_closed(self._forget)

    def reaches(self, peer_id: str) -> bool:
        """Whether the peer can be asked this way now."""
        return self._door(peer_id) is not None

    def _door(self, peer_id: str) -> Door | None:
        if self._rest_until and time.monotonic() < self._rest_until.get(peer_id, 0.0):
            return None
        return self._links.door(peer_id)

    def ask_one(self, peer_id: str, call: BulkCall, wait_s: float) -> Errors | None:
        """One question; the error if there is one, as in `ask`. An error before `call` has begun: the peer cannot be
        asked this way now, and knows nothing of the question."""
        door = self._door(peer_id)
        if door is None:
            return PeerLost(f"{peer_id!r} cannot be asked by this thread now")
        rail: BlockingRail | None = None
        refused: RemoteError | None = None
        try:
            rail = self._take(door)
            rail.send(call, wait_s)
            try:
                rail.receive()
            except RemoteError as error:
                refused = error
        except ERRORS as error:
            self._fail(peer_id, rail)
            return error
        except BaseException:
            self._close(rail)
            raise
        self._put_back(door, rail)
        return refused

    def ask(self, calls: Mapping[str, BulkCall], wait_s: float) -> dict[str, Errors]:
        """One question for each of these peers, at the same time. `wait_s`: the longest time without any byte. Returns
        the errors by peer; a peer that failed may have handled its question."""
        failed: dict[str, Errors] = {}
        asked: list[tuple[Door, BlockingRail]] = []
        for peer_id, call in calls.items():
            rail = None
            try:
                door = self._links.door(peer_id)
                if door is None:
                    raise PeerLost(f"no connection to {peer_id!r} is open")
                rail = self._take(door)
                rail.send(call, wait_s)
                asked.append((door, rail))
            except ERRORS as error:
                failed[peer_id] = error
                self._fail(peer_id, rail)
            except BaseException:
                self._close(rail, *[one for _, one in asked])
                raise
        while asked:
            door, rail = asked.pop(0)
            try:
                rail.receive()
            except RemoteError as error:
                failed[door.peer_id] = error
            except ERRORS as error:
                failed[door.peer_id] = error
                self._fail(door.peer_id, rail)
                continue
            except BaseException:
                self._close(rail, *[one for _, one in asked])
                raise
            self._put_back(door, rail)
        return failed

    def _take(self, door: Door) -> BlockingRail:
        try:
            idle = self._idle[door.peer_id, door.instance]
            while True:
                rail = idle.popleft()
                if time.monotonic() - rail.idle_since < LOOK_AFTER_S or not rail.is_over():
                    return rail
                rail.close()
        except (KeyError, IndexError):
            self._forget(door.peer_id, but=door.instance)  # a thread may have kept a rail after its peer was lost
            return BlockingRail.dial(door, self._spin_s)

    def _put_back(self, door: Door, rail: BlockingRail) -> None:
        idle = self._idle.setdefault((door.peer_id, door.instance), deque())
        if len(idle) < IDLE_MAX:
            rail.idle_since = time.monotonic()
            idle.appendleft(rail)  # the one that was used last comes first: its peer may still look for a question
        else:
            rail.close()

    def _fail(self, peer_id: str, rail: BlockingRail | None) -> None:
        """The others to that peer are probably broken, too."""
        self._rest_until[peer_id] = time.monotonic() + REST_S
        self._close(rail)
        self._forget(peer_id)

    def _forget(self, peer_id: str, but: str = "") -> None:
        """Close the idle rails to the peer's processes, except to the instance `but`."""
        for key in [key for key in list(self._idle) if key[0] == peer_id and key[1] != but]:
            self._close(*self._idle.pop(key, ()))

    def _close(self, *rails: BlockingRail | None) -> None:
        for rail in rails:
            if rail is not None:
                rail.close()

    def close(self) -> None:
        """No call may run. Idempotent."""
        for rails in self._idle.values():
            self._close(*rails)
        self._idle.clear()
