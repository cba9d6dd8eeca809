"""QuickGet: gets of blocks in the calling thread, out of mapped memory or with one question to each home over TCP."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from cache.block import BlockKey
from cache.quick.questions import GetQuestion, Room
from cache.quick.routes import Routes
from net.transfer.common.memory import Region

STAGING_BYTES = 1 << 20  # of blocks that are copied together, and then to their places while they are in the cache
ASK_BYTES = 4 << 20  # of one question
OFF_LINE = 8  # bytes: at other addresses the copy bypasses the caches (cache/index/block_read.c)


class QuickGet:
    """Any thread may call."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._at_once = max(1, STAGING_BYTES // routes.block_bytes)
        self._stagings: deque[Region] = deque()

    def get(self, keys: Sequence[BlockKey], room: Room) -> set[int]:
        """The positions of blocks that are where `room` wants them, intact. The others may have been written in part;
        ask for them through the event loop."""
        near: dict[str, list[int]] = {}
        far: dict[str, list[int]] = {}
        if not self._routes.members:
            return set()
        for position, key in enumerate(keys):
            route = self._routes.to_get(key)
            if route is not None:
                (near if route[1] else far).setdefault(route[0], []).append(position)
        arrived: set[int] = set()
        for home, positions in near.items():
            arrived.update(self._out_of_memory(home, keys, positions, room))
        if far:
            self._ask(far, keys, room, arrived)
        return arrived

    # --- homes on this host

    def _out_of_memory(self, home: str, keys: Sequence[BlockKey], positions: list[int], room: Room) -> list[int]:
        known = self._routes.memory_of(home)
        if known is None:
            return []
        code, index, arena = known
        size = self._routes.block_bytes
        if index.slot_bytes != size:
            return []
        try:
            hold = arena.memory[:0]  # an exported buffer keeps the mapping
        except ValueError:  # closed just now
            return []
        staging = self._staging()
        try:
            done: list[int] = []
            for first in range(0, len(positions), self._at_once):
                some = positions[first : first + self._at_once]
                starts = [OFF_LINE + at * size for at in range(len(some))]
                asked = [keys[position] for position in some]
                lengths = code.get_now(index, arena, asked, [staging.address + start for start in starts])
                for position, start, length in zip(some, starts, lengths, strict=True):
                    pieces = room(position, length) if length else None
                    if pieces is not None:
                        _scatter(staging.memory, start, pieces)
                        done.append(position)
        finally:
            self._stagings.append(staging)
            hold.release()
        if done:
            self._routes.were_read(home, [keys[position] for position in done])
        return done

    def _staging(self) -> Region:
        try:
            return self._stagings.pop()
        except IndexError:
            return Region.private("quick-get", self._at_once * self._routes.block_bytes + OFF_LINE)

    # --- homes over TCP

    def _ask(self, far: Mapping[str, list[int]], keys: Sequence[BlockKey], room: Room, arrived: set[int]) -> None:
        """Adds to `arrived`."""
        step = max(1, ASK_BYTES // self._routes.block_bytes)
        left = dict(far)
        while left:
            parts = {home: positions[:step] for home, positions in left.items()}
            questions = {home: self._question(some, keys, room) for home, some in parts.items()}
            failed = self._routes.calls.ask(questions, self._routes.wait_s)
            for home, question in questions.items():
                some = parts[home]
                if home in failed:
                    del left[home]
                    continue
                whole, bad = question.arrived()
                arrived.update(some[at] for at in whole)
                if question.hot:
                    self._routes.heated([(keys[some[at]], replicas) for at, replicas in question.hot])
                left[home] = [] if bad else left[home][step:]
                if not left[home]:
                    del left[home]

    def _question(self, some: Sequence[int], keys: Sequence[BlockKey], room: Room) -> GetQuestion:
        asked = [keys[position] for position in some]
        return GetQuestion(asked, self._routes.block_bytes, lambda at, nbytes: room(some[at], nbytes))

    def close(self) -> None:
        """No call may run."""
        while self._stagings:
            self._stagings.pop().close()


def _scatter(memory: memoryview, start: int, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        end = start + len(piece)
        piece[:] = memory[start:end]
        start = end
