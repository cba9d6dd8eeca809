"""The SSD tier against the disk's limit."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cache.arena import checksum
from cache.ssd import SsdTier

BLOCK = 1 << 20


def speed(nbytes: int, work: Callable[[], None]) -> float:
    """GB/s of `work`, which moves `nbytes`."""
    begin = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - begin) / 1e9


def direct(directory: Path, blocks: int) -> dict[str, float]:
    """One preallocated file, 1 MiB at a time past the page cache, in one thread: writes in order, reads at random."""
    path = directory / "direct"
    memory = mmap.mmap(-1, BLOCK)
    memory[:] = random.Random(0).randbytes(BLOCK)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, blocks * BLOCK)
        order = random.Random(1).sample(range(blocks), blocks)

        def write() -> None:
            for i in range(blocks):
                os.pwrite(fd, memory, i * BLOCK)
            os.fdatasync(fd)

        def read() -> None:
            for i in order:
                os.preadv(fd, [memory], i * BLOCK)

        return {"write": speed(blocks * BLOCK, write), "read": speed(blocks * BLOCK, read)}
    finally:
        os.close(fd)
        path.unlink()


def drop_cache(home: Path) -> None:
    """Drop the clean pages of its files from the page cache; no process may have them mapped."""
    for path in home.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def tier(directory: Path, blocks: int, backend: str) -> dict[str, float]:
    """cache.ssd with the same blocks: put and sync, put over evicted blocks, cold get with one and two threads, and get
    from the page cache if the backend uses it."""
    home = directory / "tier"
    map_bytes = int(blocks * (BLOCK + 8192) / 0.8) + (8 << 20)
    content = [random.Random(i).randbytes(BLOCK) for i in range(16)]
    sums = [checksum(one) for one in content]
    into = [memoryview(mmap.mmap(-1, BLOCK)) for _ in range(2)]  # like the slots of an arena, at a page's start
    sources = [memoryview(mmap.mmap(-1, BLOCK)) for _ in content]
    for source, one_content in zip(sources, content, strict=True):
        source[:] = one_content
    out: dict[str, float] = {}
    one = SsdTier(home, BLOCK, map_bytes, b"bench", backend=backend)

    def put(first: int) -> None:
        for i in range(first, first + blocks):
            assert one.put(i.to_bytes(16, "big"), sources[i % 16], sums[i % 16])
        one.sync()

    out["put"] = speed(blocks * BLOCK, lambda: put(0))
    out["put_recycled"] = speed(blocks * BLOCK, lambda: put(blocks))
    order = [i for i in range(2 * blocks) if one.contains(i.to_bytes(16, "big"))]
    random.Random(2).shuffle(order)

    def get(numbers: Sequence[int], buffer: memoryview) -> None:
        for i in numbers:
            found = one.get(i.to_bytes(16, "big"), buffer)
            assert found is not None and (found.checksum, found.length) == (sums[i % 16], BLOCK)

    for name, threads in (("get_cold", 1), ("get_cold_2_threads", 2)):
        one.close()
        drop_cache(home)
        one = SsdTier(home, BLOCK, map_bytes, b"bench", backend=backend)
        with ThreadPoolExecutor(threads) as pool:
            parts = [order[i::threads] for i in range(threads)]

            def cold(pool: ThreadPoolExecutor = pool, parts: list[list[int]] = parts) -> None:
                list(pool.map(get, parts, into))

            out[name] = speed(len(order) * BLOCK, cold)
    if backend == "lmdb":
        warm = order[:64]
        with open(home / "data.mdb", "rb", buffering=0) as file:  # into the page cache
            while file.read(16 << 20):
                pass
        out["get_hot"] = speed(len(warm) * BLOCK, lambda: get(warm, into[0]))
    one.close()
    for path in home.iterdir():
        path.unlink()
    home.rmdir()
    return out
