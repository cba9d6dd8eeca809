"""Homes killed with kill -9 while they are read and written, disks that are full or read-only, damage at rest."""

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache.homes.rendezvous import equal_members, homes
from cache.ssd import backends
from cache.store.options import StoreOptions
from cache.store.store import Store
from lab.faults.soak.tier import flips, kills
from net.channel.channel import Channel
from net.transfer.engine import TransferEngine
from tests.cache.home import SLOT

PROJECT = Path(__file__).parents[3]
NAMES = ("a", "b", "c")


def key_of(i: int) -> bytes:
    return random.Random(i).randbytes(16)


def value_of(i: int) -> bytes:
    return random.Random(-1 - i).randbytes(SLOT - i % 100)


class Pool:
    """Three homes in processes of their own, and a client over `order` that keeps `replicas` copies."""

    async def start(self, order: tuple[str, ...], replicas: int) -> None:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "tests.cache.home")
        starts = (
            asyncio.create_subprocess_exec(*command, name, stdin=pipe, stdout=pipe, cwd=PROJECT) for name in NAMES
        )
        self.processes = dict(zip(NAMES, await asyncio.gather(*starts), strict=True))
        self.channel = Channel("client", {})
        self.transfer = TransferEngine(self.channel, order)
        for name, process in self.processes.items():
            self.channel.introduce(name, ("127.0.0.1", int(await process.stdout.readline())))
        members = equal_members(NAMES)
        self.store = Store(
            "client",
            self.channel,
            self.transfer,
            None,
            lambda: members,
            StoreOptions(block_bytes=SLOT, replicas=replicas),
        )

    async def kill(self, name: str) -> None:
        self.processes[name].kill()
        await self.processes[name].wait()

    async def stop(self) -> None:
        await self.transfer.close()
        await self.channel.close()
        await self.store.close()
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize(("order", "replicas"), [(("shm", "tcp"), 1), (("shm", "tcp"), 2), (("tcp",), 2)])
async def test_a_home_killed_with_9_in_the_middle(order, replicas):
    """One copy: what was there is missing, and nothing else. Two copies: nobody notices."""
    pool = Pool()
    await pool.start(order, replicas)
    store, dead, slowest = pool.store, asyncio.Event(), 0.0
    written = list(range(60))

    async def read() -> None:
        nonlocal slowest
        for round_ in range(200):
            numbers = random.Random(round_).sample(range(60), 12)
            begin = time.perf_counter()
            values = await store.get_many([key_of(i) for i in numbers])
            slowest = max(slowest, time.perf_counter() - begin)
            for i, value in zip(numbers, values, strict=True):
                if value is None:
                    assert replicas == 1
                    assert homes(key_of(i), equal_members(NAMES)) == ["b"]
                else:
                    assert value == value_of(i)
            if dead.is_set() and round_ > 20:
                return

    async def write() -> None:
        for i in range(60, 100):
            await store.put(key_of(i), value_of(i))  # never an error: others stand in
            written.append(i)

    try:
        await store.put_many([(key_of(i), value_of(i)) for i in range(60)])
        works = [asyncio.create_task(read()), asyncio.create_task(write())]
        await asyncio.sleep(0.02)
        await pool.kill("b")
        dead.set()
        await asyncio.gather(*works)
        values = await store.get_many([key_of(i) for i in written])
        for i, value in zip(written, values, strict=True):
            assert value == value_of(i) or (value is None and replicas == 1)
        print(f"slowest get of 12 values around the kill: {1e3 * slowest:.1f} ms")
    finally:
        await pool.stop()


@pytest.mark.parametrize("backend", sorted(backends))
def test_kill_9_at_random_points_of_writing(tmp_path, backend):
    """scripts/faults.py soak --kills 100 is the long form."""
    seed = random.SystemRandom().randrange(1 << 32)
    counts = kills(4, tmp_path / "ssd", seed, backend)
    assert counts | {"lives": 5, "wrong": 0, "lost": 0, "failed": 0} == counts, f"seed {seed}: {counts}"
    assert counts["read"] > 0


@pytest.mark.parametrize("backend", sorted(backends))
def test_flipped_bits_are_never_wrong_bytes_and_never_the_end(tmp_path, backend):
    """scripts/faults.py soak --flips 100 is the long form."""
    seed = random.SystemRandom().randrange(1 << 32)
    counts = flips(4, tmp_path / "ssd", seed, backend)
    wanted = {"flips": 4, "wrong": 0, "deaths": 0, "stuck": 0}
    assert counts | wanted == counts, f"seed {seed}: {counts}"


DISK = """
import sys
from cache.ssd import SsdError, SsdTier
from tests.cache.ssd.test_ssd import put, read, block_of, SLOT, ROOT
try:
    tier = SsdTier(sys.argv[1] + "/ssd", SLOT, 1 << 20, ROOT, backend=sys.argv[2])
    assert put(tier, 1) and read(tier, 1) == block_of(1)
    tier.close()
    print("fits")
    tier = SsdTier(sys.argv[1] + "/more", SLOT, 1 << 20, ROOT, backend=sys.argv[2])
except SsdError as error:
    print(error)
"""


def on_own_disk(options: str, tmp_path: Path, backend: str) -> str:
    """What DISK prints on a file system of its own, mounted in a namespace of its own."""
    where = tmp_path / "disk"
    where.mkdir()
    script = f'mount -t tmpfs -o {options} none {where} && exec "$0" -c "$1" {where} {backend}'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script, sys.executable, DISK],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("backend", sorted(backends))
def test_a_full_disk_is_said_at_the_start(tmp_path, backend):
    first, second = on_own_disk("size=1536k", tmp_path, backend).splitlines()
    assert first == "fits"
    assert "bytes of room and --ssd-bytes wants" in second


@pytest.mark.parametrize("backend", sorted(backends))
def test_a_read_only_disk_is_said_at_the_start(tmp_path, backend):
    assert "Read-only file system" in on_own_disk("ro", tmp_path, backend)
    assert list((tmp_path / "disk").iterdir()) == []
