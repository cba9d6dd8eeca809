"""A real store node whose disk fails, stands still, or whose process is killed: what it promises then, and when it is
over. Faults are injected below LMDB and the slot file (lab/faults/faulty_disk.c)."""

import os
import random
import signal
import threading
import time
import urllib.request

import pytest

from cache.ssd import backends
from cache.store.client import NoRoom, NotDurable, Store
from lab.faults.faulty_disk import FaultyDisk
from lab.launch.cluster import Processes

VALUE = 64 << 10
FLAGS = ("--model", "none", "--value-bytes", "64K", "--dram-bytes", "4M", "--ssd-bytes", "64M")
MEMORY = (4 << 20) // VALUE  # values that DRAM holds


def value(i: int) -> bytes:
    return random.Random(i).randbytes(VALUE)


def key(i: int) -> bytes:
    return random.Random(-1 - i).randbytes(16)


@pytest.fixture(params=sorted(backends))
def node(request, start, tmp_path):
    """(cluster, disk, client) of one store node with a disk that can fail."""
    disk = FaultyDisk(tmp_path)
    flags = (*FLAGS, "--ssd-path", str(disk.path), "--ssd-backend", request.param)
    with start("store=1", *flags, processes=Processes(disk.env)) as cluster:
        try:
            with Store(address(cluster)) as client:
                yield cluster, disk, client
        finally:
            disk.is_wrong("")


def address(cluster) -> str:
    return cluster["store-0"].url.removeprefix("http://")


def trouble(cluster, name: str) -> float:
    """The metric."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(cluster["store-0"].url + "/metrics", timeout=30).read().decode()
    rows = [line for line in text.splitlines() if "store_disk_trouble{" in line and f'trouble="{name}"' in line]
    assert len(rows) == 1
    return float(rows[0].split()[-1])


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("backend", sorted(backends))
def test_nothing_acknowledged_as_durable_is_lost_by_kill_9(start, tmp_path, backend):
    """Four writers over both transports put without a pause until the node is killed; everything that was acknowledged
    is there when it has started again."""
    flags = (*FLAGS, "--ssd-path", str(tmp_path / "ssd"), "--ssd-backend", backend)
    with start("store=1", *flags) as cluster:
        acknowledged: list[int] = []
        names: list[int] = []

        def put(first: int, transports: tuple[str, ...]) -> None:
            try:
                with Store(address(cluster), transports=transports) as client:
                    for i in range(first, first + 1000):
                        if i % 7:
                            client.put(key(i), value(i)[: 1 + i % VALUE], durable=True)
                            acknowledged.append(i)
                        else:
                            client.put(f"objects/{i}", value(i) + value(i + 1), durable=True)
                            names.append(i)
            except Exception:  # the node is gone: whatever it says was not acknowledged
                return

        ways = (("shm", "tcp"), ("tcp",), ("shm", "tcp"), ("tcp",))
        writers = [threading.Thread(target=put, args=(10_000 * at, way)) for at, way in enumerate(ways)]
        for writer in writers:
            writer.start()
        until(lambda: len(acknowledged) > 40 and names)
        cluster.kill("store-0", signal.SIGKILL)
        for writer in writers:
            writer.join()
        cluster.restart("store-0")
        with Store(address(cluster)) as client:
            assert [i for i in acknowledged if client.get(key(i)) != value(i)[: 1 + i % VALUE]] == []
            assert [i for i in names if client.get(f"objects/{i}") != value(i) + value(i + 1)] == []


def test_a_disk_that_fails_is_said_reads_go_on_and_writes_are_made_up_for(node):
    cluster, disk, client = node
    client.put_many([(key(i), value(i)) for i in range(8)])
    client.flush()
    disk.is_wrong("write ENOSPC")
    client.put(key(100), value(100))
    with pytest.raises(NotDurable, match="No space left on device"):
        client.put(key(101), value(101), durable=True)
    with pytest.raises(NotDurable):
        client.flush()
    assert [client.get(key(i)) for i in range(8)] == [value(i) for i in range(8)]
    assert client.get(key(100)) == value(100)
    until(lambda: trouble(cluster, "failing") == 1)
    told = client.stats()["homes"].popitem()[1]["tiers"]["ssd"]["trouble"]
    assert "No space left on device" in told
    disk.is_wrong("")
    until(lambda: trouble(cluster, "failing") == 0)
    client.flush()
    client.put(key(102), value(102), durable=True)
    cluster.kill("store-0", signal.SIGKILL)
    cluster.restart("store-0")
    with Store(address(cluster)) as again:
        assert all(again.get(key(i)) == value(i) for i in (100, 101, 102))


def test_reads_that_fail_are_misses_and_the_blocks_are_back_with_the_disk(node):
    cluster, disk, client = node
    client.put_many([(key(i), value(i)) for i in range(2 * MEMORY)])
    client.flush()
    os.sync()
    disk.is_wrong("read EIO")
    newest = [i for i in range(2 * MEMORY) if client.get(key(i)) == value(i)]
    assert len(newest) >= MEMORY // 2, "what is in memory is served"
    assert len(newest) < 2 * MEMORY
    until(lambda: trouble(cluster, "failing") == 1)
    disk.is_wrong("")
    until(lambda: trouble(cluster, "failing") == 0)
    assert all(client.get(key(i)) == value(i) for i in range(2 * MEMORY))


def test_a_disk_that_stands_still_costs_what_is_only_there(node):
    cluster, disk, client = node
    client.put_many([(key(i), value(i)) for i in range(2 * MEMORY)])
    client.flush()
    disk.is_wrong("freeze")
    for i in (0, 1, 2):  # from there, or from the page cache
        assert client.get(key(i)) in (None, value(i))
    recent = [i for i in range(2 * MEMORY - 16, 2 * MEMORY) if client.get(key(i)) == value(i)]
    assert len(recent) >= 8
    for _ in range(3):
        assert [i for i in recent if client.get(key(i)) != value(i)] == [], "memory is served all the while"
    put, refused = 0, ""
    while put < 3 * MEMORY and not refused:
        try:
            client.put(key(1000 + put), value(put))
            put += 1
        except NoRoom as error:
            refused = str(error)
    assert put >= MEMORY // 4
    until(lambda: trouble(cluster, "stalled") == 1)
    disk.is_wrong("")
    until(lambda: trouble(cluster, "stalled") == 0)
    client.flush()
    assert all(client.get(key(i)) == value(i) for i in range(2 * MEMORY))
    assert all(client.get(key(1000 + i)) == value(i) for i in range(put))
    client.put(key(5000), value(1), durable=True)


def test_objects_larger_than_memory_and_larger_than_the_disk(node):
    """The first is stored and read; the second is refused, and costs nobody anything."""
    _, _, client = node
    small, large = value(1) * 3, random.Random(5).randbytes(5 * MEMORY * VALUE + 11)
    assert client.put("objects/small", small, pin=True)
    assert client.put("objects/large", large)
    assert client.get("objects/large") == large
    with pytest.raises(NoRoom, match="--ssd-bytes"):
        client.put("objects/huge", bytes(70 << 20))
    assert client.get("objects/large") == large
    assert client.get("objects/small") == small
