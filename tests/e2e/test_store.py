"""The store by itself: real nodes without a model, and the blocking client."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cache.store.client import Exists, Store, StoreError
from tests.e2e.conftest import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pool(start):
    """Three nodes that keep two copies of everything, and do not notice a loss soon; the last tests kill one of
    them."""
    flags = ("--model", "none", "--value-bytes", "64K", "--dram-bytes", "64M", "--replicas", "2", "--net", "wan")
    with start("store=3", *flags) as cluster:
        yield cluster


def address(pool, name="store-0"):
    return pool[name].url.removeprefix("http://")


def test_values_and_objects_through_the_blocking_client(pool):
    with Store(address(pool)) as store, Store(address(pool, "store-1"), transports=("tcp",)) as other:
        assert store.block_bytes == 64 << 10
        key, adapter = os.urandom(16), random.Random(1).randbytes(1_000_003)
        assert store.get(key) is None
        assert store.put(key, b"value")
        assert not store.put(key, b"other")
        assert other.get(key) == b"value"
        assert store.exists(key)
        assert store.put("objects/adapter", adapter)
        assert other.get("objects/adapter") == adapter
        assert b"".join(other.stream("objects/adapter")) == adapter
        room = bytearray(len(adapter) + 5)
        assert (store.read_into("objects/adapter", room), room[:-5]) == (len(adapter), adapter)
        assert store.read_into("objects/none", room) is None
        assert other.get_many([key, "objects/adapter", "objects/none", bytes(16)]) == [b"value", adapter, None, None]
        with pytest.raises(Exists):
            other.put("objects/adapter", b"else")
        assert other.remove("objects/adapter")
        assert store.get("objects/adapter") is None
        with pytest.raises(ValueError, match="objects/"):
            store.get("adapter")
        assert len(store.stats()["homes"]) == 3


def test_a_closed_store_and_one_of_the_parent_raise_an_error(pool):
    store, key = Store(address(pool)), os.urandom(16)
    assert store.put(key, b"value")
    child = os.fork()
    if not child:
        signal.alarm(60)  # a call whose event loop has no thread waits for ever
        try:
            store.get(key)
        except StoreError as error:
            store.close()
            os._exit("fork" not in str(error))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get(key) == b"value"
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get(key)


@pytest.mark.parametrize("order", ["cache, net, mooncake_client", "mooncake_client, cache, net"])
def test_the_client_in_a_program_with_modules_of_the_same_names(pool, tmp_path, order):
    for name in ("cache", "net"):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.append({str(ROOT)!r}); import {order}, os, sched\n"
        f"with mooncake_client.Store({address(pool)!r}) as store:\n"
        "    key = os.urandom(16)\n"
        "    print(store.put(key, b'value'), store.get(key), cache.OWN, net.OWN, 'scheduler' in dir(sched))\n"
    )
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, program], env=bare, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True b'value' True True True\n"), done.stderr


def test_blocks_of_an_arena(pool):
    with Store(address(pool)) as store:
        size = store.block_bytes
        arena = store.arena("mine", 16 * size)
        content = random.Random(2).randbytes(16 * size)
        arena.memory[:] = content
        keys = [os.urandom(16) for _ in range(16)]
        offsets = [at * size for at in range(16)]
        assert store.put_from(keys, arena, offsets) == 16
        assert store.put_from(keys, arena, offsets) == 0
        arena.memory[:] = bytes(16 * size)
        result = store.get_into([*keys, bytes(16)], arena, [*offsets, 0])
        assert result.blocks == 16
        assert set(result.transports) == {"shm"}
        assert arena.memory == content
        arena.memory[:] = bytes(16 * size)
        assert sum(part.blocks for part in store.stream_into([*keys, bytes(16)], arena, [*offsets, 0])) == 16
        assert arena.memory == content
        assert store.lookup([*keys[:3], bytes(16), keys[4]]) == 3
        assert store.exists_many([*keys, bytes(16)]) == [True] * 16 + [False]
        assert store.remove_many(keys[:4]) == 8, "two copies of each"
        assert store.exists_many(keys) == [False] * 4 + [True] * 12


def test_a_node_that_is_killed_and_started_again_at_once_gets_its_copies_back(pool):
    """Before the others have noticed its loss, if it is as quick as usual."""
    with Store(address(pool)) as store:

        def blocks():
            home = store.stats()["homes"].get("store-2")
            return 0 if home is None else home["tiers"]["dram"]["blocks"]

        keys = [os.urandom(16) for _ in range(60)]
        store.put_many([(key, b"value " + key) for key in keys])
        before = blocks()
        assert before
        pool.repeat("store-2")
        wait_until(lambda: blocks() >= before, "it has its copies")
        assert store.get_many(keys) == [b"value " + key for key in keys]


def test_a_node_killed_with_9_costs_no_value(pool):
    with Store(address(pool)) as store:
        values = {os.urandom(16): os.urandom(2000 + i) for i in range(60)}
        store.put_many(list(values.items()))
        pool.kill("store-2", signal.SIGKILL)
        assert store.get_many(list(values)) == list(values.values())
        more = {os.urandom(16): os.urandom(3000 + i) for i in range(60)}
        assert all(store.put_many(list(more.items())))
        assert store.get_many(list(more)) == list(more.values())
