"""BulkGet: asks one home for blocks and receives the answer directly in their destination
(net/transfer/tcp/bulk_call.py).

It computes their checksums as they arrive, while they are in this core's cache and the next bytes are on their way: a
separate pass afterwards would cost eight times as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64, xxh3_64_intdigest

from cache.arena import UNCHECKED
from cache.bulk_messages import GET, Get, Got
from cache.protocol import join_keys
from cache.store.job import StoreCall
from net.bodies import answered, encode
from net.errors import RemoteError
from net.transfer.common.spans import Cursor
from net.transfer.tcp.bulk_call import BulkCall

NOTHING_YET = Got([])
HASH_PIECE_BYTES = 256 << 10  # bytes of a larger block that are hashed as soon as they arrive


class BulkGet(BulkCall):
    """A get of the blocks at `positions` of a job; `checks`: whether checksums are compared."""

    def __init__(self, job: StoreCall, positions: Sequence[int], leading: bool, checks: bool) -> None:
        keys = join_keys([job.keys[position] for position in positions])
        super().__init__(GET, encode(Get(keys, leading)), len(positions) * job.block_bytes)
        self.answered_at = 0.0  # on the loop's clock, when the answer began
        self.found: list[int] = []  # positions of the blocks in the answer
        self.got = NOTHING_YET
        self.bad: set[int] = set()  # those of them that did not match their checksums
        self._job, self._positions, self._checks = job, positions, checks

    def begin(self) -> None:
        super().begin()
        self.answered_at = 0.0
        self.found, self.bad = [], set()
        self.got = NOTHING_YET

    def place(self, body: dict[str, Any], nbytes: int) -> Cursor:
        job = self._job
        self.answered_at = asyncio.get_running_loop().time()
        self.got = got = self._parsed(body)
        sums, asked = got.checksums, self._positions
        found = asked if got.slots is None else [p for p, s in zip(asked, got.slots, strict=False) if s >= 0]
        lengths = got.lengths or [job.block_bytes] * len(found)
        if sum(lengths) != nbytes:
            raise RemoteError(f"{nbytes} bytes are not {len(found)} blocks of these lengths", "bad_answer")
        if max(lengths) > job.block_bytes or min(lengths) < 1:
            raise RemoteError(f"the home has blocks of {max(lengths)} bytes, this node of {job.block_bytes}", "layout")
        self.found, self._lengths, self._sums = list(found), lengths, sums
        self._total = nbytes
        self.moved = self._done = self._begun = 0  # bytes; blocks and bytes before the one that is arriving
        self._partial: Any = None
        self._partial_bytes = 0
        return Cursor(job.region.memory, [(job.offsets[p], length) for p, length in zip(found, lengths, strict=True)])

    def _parsed(self, body: dict[str, Any]) -> Got:
        """Parses the answer. Raises RemoteError."""
        return answered(Got, body).check(len(self._positions))

    def received(self, moved: int) -> None:
        super().received(moved)
        if not self._checks:
            return
        if moved == self._total and self._partial is None:
            self._check_rest()
            return
        while self._done < len(self.found):
            length = self._lengths[self._done]
            here = moved - self._begun
            if here < length:
                if here - self._partial_bytes >= HASH_PIECE_BYTES:
                    self._hash_until(here)
                return
            self._check(length)
            self._done += 1
            self._begun += length

    def _check_rest(self) -> None:
        """Checks all blocks that are complete and not checked yet; most calls of small blocks do this once."""
        memory, offsets = self._job.region.memory, self._job.offsets
        done, self._done = self._done, len(self.found)
        for position, length, wanted in zip(self.found[done:], self._lengths[done:], self._sums[done:], strict=True):
            offset = offsets[position]
            if wanted != UNCHECKED and xxh3_64_intdigest(memory[offset : offset + length]) != wanted:
                self.bad.add(position)

    def _memory(self, start: int, end: int) -> memoryview:
        """The bytes [start, end) of the block that is arriving."""
        offset = self._job.offsets[self.found[self._done]]
        return self._job.region.memory[offset + start : offset + end]

    def _hash_until(self, end: int) -> None:
        if self._partial is None:
            self._partial = xxh3_64()
        self._partial.update(self._memory(self._partial_bytes, end))
        self._partial_bytes = end

    def _check(self, length: int) -> None:
        """Checks the complete block."""
        wanted = self._sums[self._done]
        if wanted != UNCHECKED:
            if self._partial is None:
                got = xxh3_64_intdigest(self._memory(0, length))
            else:
                self._hash_until(length)
                got = self._partial.intdigest()
            if got != wanted:
                self.bad.add(self.found[self._done])
        self._partial, self._partial_bytes = None, 0

    def settle(self, home: str) -> list[int]:
        """Writes the results into the job; returns the positions of the intact blocks. Raises RemoteError."""
        if not self.found:  # the answer had no bytes
            self.got = self._parsed(self.answer)
        job, got = self._job, self.got
        whole = [position for position in self.found if position not in self.bad]
        if not got.tiers:
            job.arrived.update(dict.fromkeys(whole, (home, "tcp", "dram")))
        else:
            origin = {position: (home, "tcp", tier) for position, tier in zip(self.found, got.tiers, strict=True)}
            job.arrived.update((position, origin[position]) for position in whole)
        if got.lengths and self.found:
            size, lengths = job.block_bytes, zip(self.found, self._lengths, strict=True)
            job.lengths.update((p, length) for p, length in lengths if length != size and p not in self.bad)
        return whole
