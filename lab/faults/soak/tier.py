"""An SSD tier that writes in a separate process until it is killed; and faults for it: SIGKILL, flipped bits.

python -m lab.faults.soak.tier DIRECTORY FIRST BACKEND      one life: the process of `kills` and `flips`
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cache.arena import checksum
from cache.ssd import New, SsdTier

ROOT = Path(__file__).resolve().parents[3]

SLOT = 20_000  # bytes: several pages, and not a whole number of them
MAP = 4 << 20
BATCH = 3  # values written together; as many may have been evicted for a batch that was not written
READABLE = 2  # maximum starts until a damaged tier serves again


def content(i: int) -> bytes:
    return random.Random(i).randbytes(SLOT)


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


def life(directory: str, first: int, backend: str) -> None:
    """One life of a tier, in a separate process: report the readable values, then write from `first` on until killed,
    and report the written values."""
    tier = SsdTier(directory, SLOT, MAP, b"soak", backend=backend)
    into = bytearray(SLOT)
    here, wrong = [], 0
    for key in sorted(tier.all_keys()):  # which keeps the order of their age
        i = int.from_bytes(key, "big")
        found = tier.get(key, into)
        if found is not None:
            here.append(i)
            wrong += bytes(into) != content(i)
    print(json.dumps({"here": here, "wrong": wrong, "capacity": tier.capacity}), flush=True)
    while True:
        rows = [New(key_of(i), content(i), checksum(content(i))) for i in range(first, first + BATCH)]
        if all(tier.put_many(rows)):
            first += len(rows)
        else:
            time.sleep(0.01)  # damaged: it fails until it restarts
        print(first, flush=True)


class Life:
    """The process of a life, as the parent sees it."""

    def __init__(self, directory: Path, first: int, backend: str) -> None:
        command = [sys.executable, "-m", "lab.faults.soak.tier", str(directory), str(first), backend]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
        self.died = False  # by itself, before `kill`

    def report(self) -> dict[str, Any] | None:
        """The readable values at its start; None if reading them killed it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else None

    def kill(self, after_s: float) -> int:
        """Kill it while it writes; returns the last position that it reported, or 0."""
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        time.sleep(after_s)
        self.died = self.process.poll() is not None
        self.process.send_signal(signal.SIGKILL)
        lines = [first, *self.process.stdout.read().splitlines(keepends=True)]
        self.process.wait()
        self.process.stdout.close()
        return max([int(line) for line in lines if line.endswith("\n")], default=0)

    def end(self) -> None:
        """No process remains. One that was not killed before has failed."""
        assert self.process.stdout is not None
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.died = True


def kills(times: int, directory: Path, seed: int, backend: str) -> dict[str, int]:
    """Counts over all lives: values read back, wrong bytes, flushed values that were missing. `failed`: lives that died
    by themselves or wrote nothing, of which a kill shows nothing."""
    rng = random.Random(seed)
    counts = {"lives": 0, "read": 0, "wrong": 0, "lost": 0, "failed": 0}
    written = 0
    for _ in range(times + 1):
        one = Life(directory, written, backend)
        try:
            report = one.report()
            last = one.kill(rng.random() * 0.05) if report is not None else 0
        finally:
            one.end()
        counts["failed"] += one.died or last <= written
        if report is None:
            counts["lost"] += written
            break
        here = set(report["here"])
        newest = max(here, default=-1)  # one more than reported may be there
        expected = range(max(0, newest + 1 - report["capacity"] + BATCH), written)
        counts["lives"] += 1
        counts["read"] += len(here)
        counts["wrong"] += report["wrong"]
        counts["lost"] += sum(i not in here for i in expected)
        written = max(written, last)
    return counts


def damage(directory: Path, rng: random.Random) -> None:
    """Flip 1 to 64 bits, half of them in LMDB's first pages or in the table, which are small and most important. A file
    that a kill left empty has none."""
    blocks, small = directory / "data.mdb", 16 * 4096
    if not blocks.exists():
        blocks = directory / "slots" if rng.random() < 0.5 else directory / "table"
    size = blocks.stat().st_size
    with blocks.open("r+b") as file:
        for _ in range(rng.randint(1, 64) if size else 0):
            at = rng.randrange(size if rng.random() < 0.5 else min(small, size))
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def flips(times: int, directory: Path, seed: int, backend: str) -> dict[str, int]:
    """Damage a stopped tier, start it, and count. `deaths`: processes that died at the start or later; `stuck`: damages
    after which it did not serve within READABLE starts."""
    rng = random.Random(seed)
    counts = {"flips": 0, "read": 0, "wrong": 0, "deaths": 0, "stuck": 0}
    written = 0
    one = Life(directory, 0, backend)
    try:
        one.report()
        for _ in range(times):
            written = max(written, one.kill(rng.random() * 0.02))
            counts["deaths"] += one.died
            damage(directory, rng)
            counts["flips"] += 1
            for _ in range(READABLE):
                one = Life(directory, written, backend)
                report = one.report()
                if report is not None:
                    counts["read"] += len(report["here"])
                    counts["wrong"] += report["wrong"]
                    break
                one.kill(0)
                counts["deaths"] += 1
            else:
                counts["stuck"] += 1
                break
    finally:
        one.end()
    return counts


if __name__ == "__main__":
    life(sys.argv[1], int(sys.argv[2]), sys.argv[3])
