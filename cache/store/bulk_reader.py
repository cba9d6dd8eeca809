"""BulkReader: gets from homes over TCP: one question per piece, whose answer contains the blocks.

It requests several pieces at the same time, so the home sends one while the checksums of another are compared here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.homes.routing import ReadWalk, Router
from cache.protocol import ELSEWHERE
from cache.store.bulk_get import BulkGet
from cache.store.calls import Calls
from cache.store.job import StoreCall, in_pieces
from net.loop.clock import loop_time


class BulkReader:
    """`patience(walk, home, positions)`: seconds to wait if another replica could be asked, or None. `damaged(home,
    count)` is called for blocks that do not match their checksums."""

    def __init__(
        self,
        calls: Calls,
        router: Router,
        patience: Callable[[ReadWalk, str, Sequence[int]], float | None],
        damaged: Callable[[str, int], None],
        checksums: bool,
    ) -> None:
        self._calls = calls
        self._router = router
        self._patience = patience
        self._damaged = damaged
        self._checksums = checksums

    async def take(self, job: StoreCall, walk: ReadWalk, home: str, positions: Sequence[int], leading: bool) -> None:
        """Gets the blocks of `positions` that the home has into the job. Raises HOME_ERRORS, TooSlow."""
        over = False  # with `leading`: a block is missing, so the later ones are not needed
        crowded: list[int] = []  # blocks on the home's SSD for which other pieces leave no room

        async def fetch(rest: Sequence[int], alone: bool) -> None:
            nonlocal over
            while rest and not over:
                call = await self._ask(job, walk, home, rest, leading)
                slots, more = call.got.slots, call.got.more
                answered = len(rest) if slots is None else len(slots)
                rest = rest[answered:]
                over = over or (leading and bool(call.bad or (rest and not more)))
                if not more:
                    return
                if not answered:
                    crowded.extend([] if alone else rest)
                    return

        await in_pieces(len(positions), job.block_bytes, lambda part: fetch(positions[part], alone=False))
        await fetch(sorted(crowded), alone=True)

    async def _ask(self, job: StoreCall, walk: ReadWalk, home: str, positions: Sequence[int], leading: bool) -> BulkGet:
        """Asks one question. The blocks of the answer go into the job, and the walk learns the answers for the
        others."""
        paces = self._router.paces
        call = BulkGet(job, positions, leading, self._checksums)
        begin = loop_time()
        paces.started(home, call.expected)
        try:
            await self._calls.ask(home, call, self._patience(walk, home, positions))
            whole = call.settle(home)
        except BaseException:
            paces.failed(home, call.expected)
            raise
        answered = call.answered_at or loop_time()
        paces.ended(home, call.expected, answered - begin, loop_time() - answered if whole else 0.0)
        walk.found_all(whole)
        for position, slot in zip(positions, call.got.slots or (), strict=False):
            if slot == ELSEWHERE:
                walk.elsewhere(position)
        for at, replicas in call.got.hot:
            self._router.heated(loop_time(), job.keys[positions[at]], replicas)
        if call.bad:
            self._damaged(home, len(call.bad))
            self._calls.report(home, [job.keys[position] for position in call.bad])
        return call
