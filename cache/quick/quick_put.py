"""QuickPut: puts of new blocks in the calling thread, in lent slots or with one question to each home."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from cache.block import BlockKey
from cache.offer import BlockFacts, Offer
from cache.pool.policy import OBJECTS
from cache.protocol import OVER, PRESENT, STORED
from cache.quick.lent_slots import LentSlots
from cache.quick.near_question import TakeQuestion, room_for
from cache.quick.questions import PutQuestion
from cache.quick.routes import Routes
from net.transfer.common.memory import Region

ASK_BYTES = 4 << 20  # of one question
CHUNKS = 8  # questions to homes on this host at the same time
REST_S = 1.0  # after a home has answered that it does not map the memory (yet)
FACTS = BlockFacts([OBJECTS.position], [OBJECTS.cost_s], [OBJECTS.service_class])


class Part(NamedTuple):
    """Blocks of one question."""

    positions: list[int]
    nbytes: int
    near: bool


class QuickPut:
    """Any thread may call. Keys are the callers', so their home decides: the first put of a key stays. Create it on the
    event loop, which homes ask for `region`."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._chunk_bytes = ASK_BYTES + routes.block_bytes
        self.region = Region.shared("quick-put", CHUNKS * self._chunk_bytes)
        self._chunks = deque(range(0, CHUNKS * self._chunk_bytes, self._chunk_bytes))
        self._rest_until: dict[str, float] = {}
        self._lent = LentSlots(routes)

    def put(self, keys: Sequence[BlockKey], blocks: Sequence[Sequence[memoryview]]) -> dict[int, int]:
        """Each block in pieces of memory that does not change meanwhile. STORED or PRESENT by position for blocks that
        the pool has now, and OVER for those that it refuses because of their tenant's quota. The others may be stored
        later, or not: put them again through the event loop."""
        members = self._routes.members
        done: dict[int, int] = {}
        left = self._parts(keys, blocks, done) if members else {}
        offer = Offer(divert=members > 1, decide=True, facts=FACTS)
        while left:
            asked = {home: parts.popleft() for home, parts in left.items()}
            with ExitStack() as stack:
                questions = {
                    home: self._question(stack, home, part, keys, blocks, offer) for home, part in asked.items()
                }
                failed = self._routes.calls.ask(questions, self._routes.wait_s)
            for home, part in asked.items():
                question = questions[home]
                if home not in failed and isinstance(question, TakeQuestion) and question.unmapped:
                    self._rest_until[home] = time.monotonic() + REST_S
                    left[home].appendleft(part)
                elif home in failed or (slots := question.stored()) is None:
                    left[home].clear()
                else:
                    rows = zip(part.positions, slots, strict=False)
                    done.update((position, slot) for position, slot in rows if slot in (STORED, PRESENT, OVER))
            left = {home: parts for home, parts in left.items() if parts}
        return done

    def _parts(
        self, keys: Sequence[BlockKey], blocks: Sequence[Sequence[memoryview]], done: dict[int, int]
    ) -> dict[str, deque[Part]]:
        """The questions to each home; `done` gets the blocks that went into lent slots."""
        groups: dict[str, deque[Part]] = {}
        for position, key in enumerate(keys):
            nbytes = sum(map(len, blocks[position]))
            route = self._routes.to_put(key, nbytes)
            if route is None:
                continue
            home, near = route
            if self._lent.put(home, key, blocks[position], nbytes):
                done[position] = STORED
                continue
            parts = groups.setdefault(home, deque())
            if parts and parts[-1].near == near and parts[-1].nbytes + nbytes <= ASK_BYTES:
                last = parts.pop()
                parts.append(Part([*last.positions, position], last.nbytes + nbytes, near))
            else:
                parts.append(Part([position], nbytes, near))
        return groups

    def _question(
        self,
        stack: ExitStack,
        home: str,
        part: Part,
        all_keys: Sequence[BlockKey],
        all_blocks: Sequence[Sequence[memoryview]],
        offer: Offer,
    ) -> PutQuestion | TakeQuestion:
        """What it needs stays reserved until the stack is closed."""
        keys, blocks = [all_keys[at] for at in part.positions], [all_blocks[at] for at in part.positions]
        rests = time.monotonic() < self._rest_until.get(home, 0.0)
        if part.near and not rests and room_for(blocks) <= self._chunk_bytes:
            start, mark = stack.enter_context(self._chunk()), stack.enter_context(self._routes.marks.mark())
            if start is not None and mark is not None:
                return TakeQuestion(keys, blocks, offer, self.region, start, self._routes.block_bytes, mark)
        return PutQuestion(keys, blocks, offer)

    @contextmanager
    def _chunk(self) -> Iterator[int | None]:
        """The offset of `_chunk_bytes` of the region; None if all are in use."""
        try:
            start = self._chunks.pop()
        except IndexError:
            yield None
            return
        try:
            yield start
        finally:
            self._chunks.append(start)

    def close(self) -> None:
        """No call may run."""
        self._lent.close()
        self.region.close()
