"""The SSD tier on each of its media next to fio, in one run: put into a new file, put over evicted blocks, get.

fio does the operations that the medium does (fio.py): one block per call, past the page cache or through it, and the
same syncs. Ours and fio take turns, and the other one begins in the next round, because disks drift. The tier also
keeps an index on disk and verifies a checksum at every get.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cache.arena import checksum
from cache.ssd import SsdTier
from cache.ssd.lmdb_medium import AHEAD_BYTES
from lab.bench.common.results import Row
from lab.bench.transfer.fio import FioError, Job, fio_speed

BLOCK = 1 << 20
CONTENTS = 16  # different blocks
NEVER_MS = 3_600_000
"""Interval of the tier's syncs: none runs during a put, and one at its end, as in fio."""

SYNCED = 8
"""Puts that are each synced, and gets from the page cache, move so much less: one block of this many."""

GOALS = {"put": 0.5, "get_cold": 0.8, "get_cold_2_threads": 0.8}
"""Row -> the least share of fio's speed."""


def jobs(backend: str, blocks: int) -> dict[str, Job]:
    """Row -> what fio does for it, in the order of a round."""
    cached = backend == "lmdb"
    write = Job("write", blocks, BLOCK, cached=cached, ahead=AHEAD_BYTES // BLOCK if cached else 0)
    found = {
        "put": write,
        "put_recycled": write,
        "put_synced": Job("write", blocks // SYNCED, BLOCK, cached=cached, sync_each=True),
        "get_cold": Job("read", blocks, BLOCK),
        "get_cold_2_threads": Job("read", blocks, BLOCK, threads=2),
    }
    return found | ({"get_hot": Job("read", blocks // SYNCED, BLOCK, cached=True, resident=True)} if cached else {})


class TierRun:
    """One tier in a new directory, and its rows in the order of `jobs`. `close` deletes the directory."""

    def __init__(self, directory: Path, blocks: int, backend: str) -> None:
        self._home, self._blocks, self._backend = directory, blocks, backend
        self._sources = [memoryview(mmap.mmap(-1, BLOCK)) for _ in range(CONTENTS)]  # like slots of an arena
        for number, source in enumerate(self._sources):
            source[:] = random.Random(number).randbytes(BLOCK)
        self._sums = [checksum(source) for source in self._sources]
        self._into = [memoryview(mmap.mmap(-1, BLOCK)) for _ in range(2)]
        self._next = 0  # number of the next block that is put
        self._open(NEVER_MS)

    def speed(self, row: str) -> float:
        """GB/s of a row."""
        if row.startswith("put"):
            return self._put(row)
        if row == "get_hot":
            return self._get(self._present()[: self._blocks // SYNCED], 1, _fill_cache)
        return self._get(self._present()[: self._blocks], 2 if row.endswith("2_threads") else 1, _drop_cache)

    def close(self) -> None:
        self._tier.close()
        for path in self._home.iterdir():
            path.unlink()
        self._home.rmdir()

    def _open(self, sync_ms: int) -> None:
        nbytes = int(self._blocks * (BLOCK + 8192) / 0.8) + (8 << 20)
        self._tier = SsdTier(self._home, BLOCK, nbytes, b"bench", sync_ms=sync_ms, backend=self._backend)

    def _reopen(self, between: Callable[[Path], None], sync_ms: int = NEVER_MS) -> None:
        self._tier.close()
        between(self._home)
        self._open(sync_ms)

    def _put(self, row: str) -> float:
        synced = row == "put_synced"
        if synced:
            self._reopen(lambda home: None, sync_ms=0)
        numbers = range(self._next, self._next + self._blocks // (SYNCED if synced else 1))
        self._next = numbers.stop

        def work() -> None:
            for i in numbers:
                if not self._tier.put(_key(i), self._sources[i % CONTENTS], self._sums[i % CONTENTS]):
                    raise RuntimeError(f"the tier did not keep a block: {self._tier.stats()['trouble']}")
            if not synced and not self._tier.sync():
                raise RuntimeError(f"the tier did not sync: {self._tier.stats()['trouble']}")

        return _speed(len(numbers), work)

    def _present(self) -> list[int]:
        """The blocks that the tier has, in random order."""
        found = [i for i in range(self._next) if self._tier.contains(_key(i))]
        random.Random(2).shuffle(found)
        return found

    def _get(self, numbers: Sequence[int], threads: int, before: Callable[[Path], None]) -> float:
        self._reopen(before)

        def get(some: Sequence[int], buffer: memoryview) -> None:
            for i in some:
                found = self._tier.get(_key(i), buffer)
                if found is None or (found.checksum, found.length) != (self._sums[i % CONTENTS], BLOCK):
                    raise RuntimeError(f"the tier lost block {i}: {self._tier.stats()['trouble']}")

        with ThreadPoolExecutor(threads) as pool:
            parts = [numbers[first::threads] for first in range(threads)]
            return _speed(len(numbers), lambda: list(pool.map(get, parts, self._into)))


class NextToFio:
    """The rounds of one medium in `directory`. `missing`: why fio has no speed; then only ours is measured."""

    def __init__(self, directory: Path, blocks: int, backend: str) -> None:
        self._directory, self._blocks, self._backend = directory, blocks, backend
        self._ours: dict[str, list[float]] = {}
        self._fio: dict[str, list[float]] = {}
        self.missing = ""

    def measure(self, number: int) -> None:
        """Round `number`: each row once by both, in files that are new at its beginning and deleted at its end."""
        file = self._directory / "fio"
        tier = TierRun(self._directory / "tier", self._blocks, self._backend)
        try:
            for row, job in jobs(self._backend, self._blocks).items():
                turns = [partial(self._by_tier, tier, row), partial(self._by_fio, file, row, job)]
                for turn in turns if number % 2 else reversed(turns):
                    turn()
        finally:
            tier.close()
            file.unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        """The medians of all rounds."""
        return [
            Row(
                f"{self._backend}, {row}",
                "speed",
                "GB/s",
                median(found),
                peers={"fio": None if self.missing else median(self._fio[row])},
                note=self.missing,
            )
            for row, found in self._ours.items()
        ]

    def _by_tier(self, tier: TierRun, row: str) -> None:
        self._ours.setdefault(row, []).append(tier.speed(row))

    def _by_fio(self, file: Path, row: str, job: Job) -> None:
        if self.missing:
            return
        try:
            self._fio.setdefault(row, []).append(fio_speed(file, job))
        except FioError as error:
            self.missing = str(error)


def goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per row that has a goal and fio's speed: what, ratio, goal, met."""
    found: list[dict[str, Any]] = []
    for row in rows:
        goal, theirs = GOALS.get(row.case.partition(", ")[2]), row.peers["fio"]
        if goal is not None and theirs is not None and row.ours is not None:
            ratio = row.ours / theirs
            what = f"{row.case}: GB/s of ours / fio"
            found.append({"what": what, "ratio": ratio, "goal": f">= {goal}", "met": ratio >= goal})
    return found


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _speed(blocks: int, work: Callable[[], object]) -> float:
    """GB/s of `work`, which moves this number of blocks."""
    begin = time.perf_counter()
    work()
    return blocks * BLOCK / (time.perf_counter() - begin) / 1e9


def _drop_cache(home: Path) -> None:
    """Drop the clean pages of its files from the page cache; no process may have them mapped."""
    for path in home.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _fill_cache(home: Path) -> None:
    """Read its blocks into the page cache."""
    with open(home / "data.mdb", "rb", buffering=0) as file:
        while file.read(16 << 20):
            pass
