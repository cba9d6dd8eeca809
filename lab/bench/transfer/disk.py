"""The SSD tier against the disk's limit, and how much data beyond its memory a small node keeps."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cache.arena import checksum
from cache.ssd import SsdTier, backends
from cache.store.client import Store
from net.channel.sockets import listen

__all__ = ["backends", "direct", "small_node", "tier"]

BLOCK = 1 << 20
PROJECT = Path(__file__).resolve().parents[3]


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


class StoreNode:
    """`mooncake.py --role store --model none` in a separate process."""

    def __init__(self, *flags: str) -> None:
        self.flags = flags
        self.start()

    def start(self) -> None:
        """Start the node; also restarts it after `kill`."""
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        command = [sys.executable, str(PROJECT / "mooncake.py"), "--role", "store", "--model", "none"]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), *self.flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the store ended with {self.process.wait()}")
        self.address = json.loads(line)["url"].removeprefix("http://")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def small_node(directory: Path, values: int, value_bytes: int, dram_bytes: int, backend: str) -> dict[str, Any]:
    """Puts values to a node whose memory holds only a part of them; counts the readable ones before and after kill -9
    and a restart on the same directory."""
    flags = ["--value-bytes", str(value_bytes), "--dram-bytes", str(dram_bytes), "--ssd-path", str(directory / "node")]
    flags += ["--ssd-backend", backend]
    node = StoreNode(*flags, "--ssd-bytes", str(int(values * value_bytes * 1.4) + (16 << 20)))
    keys = [i.to_bytes(16, "big") for i in range(values)]

    def content(i: int) -> bytes:
        return random.Random(i).randbytes(value_bytes)

    def readable() -> int:
        with Store(node.address) as store:
            return sum(store.get(key) == content(i) for i, key in enumerate(keys))

    try:
        begin = time.perf_counter()
        with Store(node.address) as store:
            stored = sum(store.put(key, content(i)) for i, key in enumerate(keys))
        seconds = time.perf_counter() - begin
        before = readable()
        node.kill()
        node.start()
        return {
            "backend": backend,
            "values": values,
            "value_bytes": value_bytes,
            "dram_bytes": dram_bytes,
            "acknowledged": stored,
            "put_seconds": seconds,
            "readable": before,
            "readable_after_kill_9": readable(),
        }
    finally:
        node.kill()
        for path in (directory / "node").glob("*"):
            path.unlink()
        (directory / "node").rmdir()
