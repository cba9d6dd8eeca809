"""NearPut: puts to homes on this host, which copy the blocks from this process's memory (cache/server/taking.py)."""

from __future__ import annotations

from collections.abc import Sequence

from cache.messages import Take, TakenThere
from cache.offer import Offer
from cache.protocol import join_keys
from cache.stable_marks import StableMarks
from cache.store.calls import Calls
from cache.store.job import StoreCall
from net.loop.clock import loop_time
from net.transfer.common.path import LOCAL
from net.transfer.engine import TransferEngine

REST_S, REST_MAX_S = 0.005, 5.0  # after a home has answered that it does not map the memory; doubles


class NearPut:
    """The near puts of one client."""

    def __init__(self, calls: Calls, transfer: TransferEngine) -> None:
        self._calls = calls
        self._transfer = transfer
        self._marks: StableMarks | None = None
        # (home, region) -> end of its rest, and the length of the next one
        self._rests: dict[tuple[str, str], tuple[float, float]] = {}

    async def put(
        self, home: str, job: StoreCall, positions: Sequence[int], offer: Offer, checks: bool
    ) -> TakenThere | None:
        """The home's answer about these blocks, which get checksums if `checks`; None if it cannot copy them, so that
        they must go another way. Raises HOME_ERRORS."""
        if job.region.memfd is None or not self._is_near(home):
            return None
        way = home, job.region.name
        if self._rests and loop_time() < self._rests.get(way, (0.0, 0.0))[0]:
            return None
        with self.marks().mark() as mark:
            if mark is None:
                return None
            take = Take(
                join_keys([job.keys[position] for position in positions]),
                job.block_bytes,
                job.region.name,
                [job.offsets[position] for position in positions],
                mark,
                [job.length(position) for position in positions] if job.lengths else (),
                checks,
                offer,
            )
            taken = await self._calls.take(home, take, len(positions))
        if taken.mapped:
            self._rests.pop(way, None)
            return taken
        _, pause_s = self._rests.get(way, (0.0, REST_S))
        self._rests[way] = loop_time() + pause_s, min(REST_MAX_S, 2 * pause_s)
        return None

    def marks(self) -> StableMarks:
        """The marks of this client's puts; homes map them with the first put."""
        if self._marks is None:
            self._marks = StableMarks()
            self._transfer.register(self._marks.region)
        return self._marks

    def _is_near(self, home: str) -> bool:
        path = self._transfer.path_of(home)
        return path is LOCAL or (path is not None and path.transport == "shm")

    def close(self) -> None:
        if self._marks is not None:
            self._marks.close()
