"""The SSD tier on real files, in both backends: restarts, crashes, damage, and who may open it."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache.ssd.claim
import cache.ssd.tier
from cache.arena import checksum
from cache.ssd import New, SsdError, SsdTier, backends, lmdb_medium

SLOT = 5000
MAP = 1 << 20
ROOT = b"r" * 16
PROJECT = Path(__file__).parents[3]


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


def block_of(i: int, nbytes: int = SLOT) -> bytes:
    return random.Random(i).randbytes(nbytes)


def put(tier: SsdTier, i: int) -> bool:
    return tier.put(key_of(i), block_of(i, tier.slot_bytes), checksum(block_of(i, tier.slot_bytes)))


def read(tier: SsdTier, i: int) -> bytes | None:
    into = bytearray(tier.slot_bytes)
    found = tier.get(key_of(i), into)
    if found is None:
        return None
    assert (found.checksum, found.length) == (checksum(into), len(into))
    return bytes(into)


@pytest.fixture(params=sorted(backends), scope="module")
def backend(request):
    return request.param


@pytest.fixture
def blocks_file(backend, tmp_path):
    """Where the blocks lie."""
    return tmp_path / "ssd" / {"lmdb": "data.mdb", "file": "slots"}[backend]


@pytest.fixture
def make(tmp_path, backend):
    """Opens tiers in one directory; closes what is still open."""
    tiers = []

    def open_tier(slot_bytes=SLOT, map_bytes=MAP, root=ROOT, directory=tmp_path / "ssd", backend=backend, **options):
        tiers.append(SsdTier(directory, slot_bytes, map_bytes, root, backend=backend, **options))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


def test_a_block_is_read_back_and_can_be_deleted(make):
    tier = make()
    assert put(tier, 1)
    assert tier.contains(key_of(1))
    assert read(tier, 1) == block_of(1)
    assert tier.delete(key_of(1))
    assert not tier.delete(key_of(1))
    assert not tier.contains(key_of(1))
    assert read(tier, 1) is None
    assert (
        tier.stats() | {"hits": 1, "misses": 1, "writes": 1, "blocks": 0, "corrupt": 0, "failures": 0} == tier.stats()
    )


def test_the_first_put_of_a_key_stays(make):
    tier = make()
    assert put(tier, 1)
    assert tier.put(key_of(1), block_of(2), checksum(block_of(2)))
    assert read(tier, 1) == block_of(1)


def test_a_block_of_another_size_is_refused(make):
    with pytest.raises(ValueError, match="exceeds the slots of 5000 bytes"):
        make().put(key_of(1), bytes(SLOT + 1), 0)


def test_blocks_survive_a_restart(make):
    tier = make()
    for i in range(20):
        assert put(tier, i)
    tier.close()
    tier = make()
    assert tier.stats()["blocks"] == 20
    assert all(read(tier, i) == block_of(i) for i in range(20))


def test_a_restart_keeps_the_order_of_eviction(make):
    tier = make()
    for i in range(tier.capacity):
        put(tier, i)
    tier.close()
    tier = make()
    put(tier, 1000)
    assert [i for i in range(tier.capacity) if not tier.contains(key_of(i))] == [0]


def test_short_blocks_keep_their_length(make):
    """Shorter than LMDB would give pages of their own."""
    tier, into = make(), bytearray(SLOT)
    for i in range(1, 60):
        assert tier.put(key_of(i), block_of(i, i), checksum(block_of(i, i)))
    tier.close()
    tier = make()
    for i in range(1, 60):
        assert tier.get(key_of(i), into)[1:3] == (checksum(block_of(i, i)), i)
        assert into[:i] == block_of(i, i)


def test_the_file_keeps_its_size_and_the_oldest_go(make, blocks_file):
    tier = make()
    for i in range(3 * tier.capacity):
        assert put(tier, i)
        assert tier.stats()["blocks"] <= tier.capacity
    stats = tier.stats()
    assert stats["failures"] == 0
    assert stats["evictions"] == 2 * tier.capacity
    assert sum(path.stat().st_size for path in blocks_file.parent.iterdir() if path.name != "lock.mdb") > 0.97 * MAP
    assert blocks_file.stat().st_size <= MAP
    last = range(2 * tier.capacity, 3 * tier.capacity)
    assert all(read(tier, i) == block_of(i) for i in last)
    assert not any(tier.contains(key_of(i)) for i in range(2 * tier.capacity))


def test_used_blocks_stay_longer(make):
    tier = make()
    for i in range(tier.capacity):
        put(tier, i)
    read(tier, 0)
    tier.touch(key_of(1))
    tier.touch(key_of(10**6))  # not here: ignored
    put(tier, 1000)
    put(tier, 1001)
    assert [i for i in range(5) if not tier.contains(key_of(i))] == [2, 3]


@settings(max_examples=15, deadline=None)
@given(st.integers(64, 20_000), st.integers(0, 2**32), st.sampled_from([MAP // 2, MAP]))
def test_eviction_comes_before_a_full_map(backend, tmp_path_factory, slot_bytes, seed, map_bytes):
    """For any block size: writes, hits and deletes in any order never fill the map."""
    rng = random.Random(seed)
    tier = SsdTier(tmp_path_factory.mktemp("churn"), slot_bytes, map_bytes, ROOT, backend=backend)
    try:
        for i in range(min(300, 3 * tier.capacity)):
            assert put(tier, i)
            if rng.random() < 0.2:
                tier.delete(key_of(rng.randrange(i + 1)))
            j = rng.randrange(i + 1)
            assert read(tier, j) in (None, block_of(j, slot_bytes))
        assert tier.stats()["failures"] == tier.stats()["corrupt"] == 0
    finally:
        tier.close()


def test_a_damaged_block_is_a_miss_and_goes(make, blocks_file):
    tier = make()
    for i in range(3):
        put(tier, i)
    tier.close()
    content = bytearray(blocks_file.read_bytes())
    at = content.index(block_of(1)[:64]) + 40
    content[at] ^= 1
    blocks_file.write_bytes(content)
    tier = make()
    assert [read(tier, i) for i in range(3)] == [block_of(0), None, block_of(2)]
    assert not tier.contains(key_of(1))
    assert tier.stats()["corrupt"] == 1
    assert put(tier, 1)
    assert read(tier, 1) == block_of(1)


def test_dirty_when_the_machine_went_down(make, monkeypatch, caplog, backend):
    """LMDB's trees cannot be relied on then. A file of slots can: every block has its own checksum."""
    tier = make()
    put(tier, 1)
    monkeypatch.setattr(cache.ssd.claim.Claim, "end", lambda claim: None)  # the machine dies before the tier is clean
    tier.close()
    monkeypatch.setattr(cache.ssd.claim, "boot_id", lambda: "the next boot")
    tier = make()
    assert ("when the machine went down" in caplog.text) == (backend == "lmdb")
    assert read(tier, 1) == (None if backend == "lmdb" else block_of(1))


def test_clean_when_the_machine_went_down_means_kept(make, monkeypatch):
    tier = make()
    put(tier, 1)
    tier.close()
    monkeypatch.setattr(cache.ssd.claim, "boot_id", lambda: "the next boot")
    assert read(make(), 1) == block_of(1)


@pytest.mark.parametrize("change", [{"root": b"s" * 16}, {"slot_bytes": SLOT + 1}])
def test_another_model_is_refused_and_nothing_is_lost(make, change):
    tier = make()
    put(tier, 1)
    tier.close()
    with pytest.raises(SsdError, match=r"another model or layout.*--ssd-path"):
        make(**change)
    assert read(make(), 1) == block_of(1)


def test_two_tiers_of_one_process_cannot_share(make):
    tier = make()
    put(tier, 1)
    with pytest.raises(SsdError, match=f"process {os.getpid()} uses .*--ssd-path"):
        make()
    assert read(tier, 1) == block_of(1)
    tier.close()
    assert read(make(), 1) == block_of(1)


def test_another_backend_is_refused_and_nothing_is_lost(make, backend):
    tier = make()
    put(tier, 1)
    tier.close()
    other = next(name for name in backends if name != backend)
    with pytest.raises(SsdError, match=f"--ssd-backend {backend}.*--ssd-path"):
        make(backend=other)
    assert read(make(), 1) == block_of(1)


@pytest.mark.parametrize("name", ["owner", "tier"])
def test_damage_to_what_is_known_of_a_tier_does_not_stop_it(make, name):
    """One bit of the records next to the blocks: the tier starts, with its blocks or empty."""
    for bit in range(0, 8 * 150, 61):
        tier = make()
        put(tier, 1)
        tier.close()
        path = tier.directory / name
        content = bytearray(path.read_bytes())
        content[bit // 8 % len(content)] ^= 1 << bit % 8
        path.write_bytes(content)
        tier = make()
        assert read(tier, 1) in (None, block_of(1))
        assert put(tier, 2)
        tier.close()


WRITER = """
import sys
from tests.cache.ssd.test_ssd import SsdTier, put, SLOT, MAP, ROOT
tier = SsdTier(sys.argv[1], SLOT, MAP, ROOT, backend=sys.argv[2])
i = 0
while True:
    assert put(tier, i)
    print(i, flush=True)
    i += 1
"""


@pytest.fixture
def writer(tmp_path, backend):
    """A process that puts block 0, 1, 2 ... and prints the number of each that is acknowledged."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "ssd"), backend], stdout=subprocess.PIPE, cwd=PROJECT, text=True
    )
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_another_process_cannot_share(make, writer):
    assert writer.stdout.readline() == "0\n"
    with pytest.raises(SsdError, match=f"process {writer.pid} uses"):
        make()


@pytest.mark.parametrize("count", [1, 90, 400])
def test_no_acknowledged_block_is_lost_by_kill_9(make, writer, count):
    """Also while blocks are being evicted (the tier holds fewer than 400)."""
    acknowledged = -1
    for _ in range(count):
        acknowledged = int(writer.stdout.readline())
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])
    writer.wait()
    tier = make()
    newest = max(i for i in range(acknowledged + 2) if tier.contains(key_of(i)))  # the last one may lack its answer
    expected = range(max(0, newest - tier.capacity + 1), acknowledged + 1)
    assert all(read(tier, i) == block_of(i) for i in expected)
    assert tier.stats()["corrupt"] == 0
    assert put(tier, 10**6)


def test_a_foreign_database_is_left_alone(make, tmp_path):
    directory = tmp_path / "ssd"
    with lmdb.open(str(directory)) as env, env.begin(write=True) as txn:
        txn.put(b"precious", b"data")
    for _ in range(2):
        with pytest.raises(SsdError, match="foreign database"):
            make()
    with lmdb.open(str(directory)) as env, env.begin() as txn:
        assert txn.get(b"precious") == b"data"


def test_a_path_that_cannot_be_a_directory(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SsdError, match=r"cannot write to .*--ssd-path"):
        make(directory=tmp_path / "file" / "ssd")


def test_a_budget_beyond_the_disk_is_refused_before_anything_is_written(make, tmp_path):
    with pytest.raises(SsdError, match=r"bytes of room.*--ssd-path"):
        make(map_bytes=1 << 55)
    assert {path.name for path in (tmp_path / "ssd").iterdir()} <= {"owner", "tier"}
    assert put(make(), 1)


def test_a_budget_below_one_block_is_refused(make):
    with pytest.raises(SsdError, match="--ssd-bytes 12288 is too small"):
        make(map_bytes=12288)


def test_a_budget_may_grow_but_not_shrink(make):
    tier = make()
    put(tier, 1)
    tier.close()
    with pytest.raises(SsdError, match="raise it, or delete"):
        make(map_bytes=MAP // 2)
    grown = make(map_bytes=2 * MAP)
    assert read(grown, 1) == block_of(1)
    assert grown.capacity > 1.9 * tier.capacity


LIMITED = """
import resource, sys
from tests.cache.ssd.test_ssd import SsdError, SsdTier, SLOT, MAP, ROOT
resource.setrlimit(resource.RLIMIT_FSIZE, (MAP // 2, MAP // 2))
try:
    SsdTier(sys.argv[1], SLOT, MAP, ROOT, backend=sys.argv[2])
except SsdError as error:
    print(error)
"""


def test_a_file_that_cannot_be_set_aside_is_a_clear_error(tmp_path, backend, blocks_file):
    directory = tmp_path / "ssd"
    command = [sys.executable, "-c", LIMITED, str(directory), backend]
    run = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert "--ssd-bytes" in run.stdout, run.stderr
    assert not blocks_file.exists(), "an attempt that failed leaves no large file behind"


class Synced:
    """Stands before a tier's medium: what had been written at each sync."""

    def __init__(self, tier: SsdTier) -> None:
        self.tier, self.medium = tier, tier._medium
        self.at: list[int] = []  # blocks
        self.once = threading.Event()

    def sync(self) -> None:
        written = self.tier.stats()["writes"]  # before the sync begins: these it covers
        self.medium.sync()
        self.at.append(written)
        self.once.set()

    def __getattr__(self, name: str):
        return getattr(self.medium, name)


def test_with_a_window_of_zero_a_put_returns_when_it_is_on_disk(make, monkeypatch):
    tier = make(sync_ms=0)
    monkeypatch.setattr(tier, "_medium", synced := Synced(tier))
    assert put(tier, 1)
    assert put(tier, 2)
    rows = [New(key_of(i), block_of(i), checksum(block_of(i))) for i in range(3, 9)]
    assert tier.put_many(rows) == [True] * 6
    assert synced.at == [1, 2, 8], "many together have one sync"
    monkeypatch.setattr(synced.medium, "sync", BrokenDisk().fail)
    assert not put(tier, 9), "what could not be synced is not acknowledged"


def test_within_the_window_everything_written_is_synced_by_itself(make, monkeypatch):
    tier = make(sync_ms=1)
    monkeypatch.setattr(tier, "_medium", synced := Synced(tier))
    for i in range(5):
        synced.once.clear()
        assert put(tier, i)
        while max(synced.at, default=0) <= i:  # one that had begun before does not count
            assert synced.once.wait(20)
            synced.once.clear()


def test_lmdb_lets_the_disk_begin_before_the_sync(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_medium, "AHEAD_BYTES", 2 * SLOT)
    tier = SsdTier(tmp_path / "ssd", SLOT, MAP, ROOT, sync_ms=10**6)
    file = tier._medium._values.file
    began = []
    begin = file.begin_writing
    monkeypatch.setattr(file, "begin_writing", lambda: (begin(), began.append(tier.stats()["writes"])))
    for i in range(6):
        assert put(tier, i)
    assert began == [1, 3, 5], "with every second block"
    assert all(read(tier, i) == block_of(i) for i in range(6))
    tier.close()


class BrokenDisk:
    """A medium whose disk has failed."""

    batch, capacity = 4, 100

    def fail(self, *_: object):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write = erase = read = sync = fail


def test_a_failing_disk_is_counted_and_not_a_crash(make, monkeypatch, caplog):
    tier = make()
    put(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "_medium", BrokenDisk())
        for i in range(2, 5):
            assert not put(tier, i)
        assert read(tier, 1) is None
    assert tier.stats()["failures"] >= 4
    assert "Input/output error" in caplog.text
    assert put(tier, 2), "the disk is back"
    assert read(tier, 2) == block_of(2)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("between", ["the block is read", "others are read"])
def test_a_disk_that_fails_twice_costs_no_block(make, monkeypatch, between):
    """The second time, other blocks had been read since the block's last failure."""
    monkeypatch.setattr(cache.ssd.tier, "TEND_S", 0.01 if between == "others are read" else 1e6)
    tier = make()
    for i in (1, 2):
        assert put(tier, i)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(tier._medium, "read", BrokenDisk().fail)
            assert read(tier, 1) is None
        if between == "the block is read":
            assert [read(tier, i) for i in (1, 2)] == [block_of(1), block_of(2)]
        else:
            until(lambda: read(tier, 2) == block_of(2) and not tier._index._unread)
    assert tier.contains(key_of(1))
    assert tier.stats()["corrupt"] == 0


def test_a_block_that_stays_unreadable_is_dropped(make, monkeypatch):
    monkeypatch.setattr(cache.ssd.tier, "TEND_S", 0.01)
    tier = make()
    for i in (1, 2):
        assert put(tier, i)
    bad, read_one = tier._index.entries[key_of(1)], tier._medium.read
    monkeypatch.setattr(
        tier._medium, "read", lambda entry, into: (BrokenDisk().fail if entry is bad else read_one)(entry, into)
    )
    assert read(tier, 1) is None
    until(lambda: read(tier, 2) == block_of(2) and not tier.contains(key_of(1)))
    assert not tier._index._unread
    assert tier.stats()["corrupt"] == 1


def test_closing_twice_is_closing_once(make):
    tier = make()
    tier.close()
    tier.close()
