"""Upstream's store calls on three real nodes: values of every size, names, codes, sessions, tenants, a lost node."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cache.store.client import Store
from connect.common.raw_memory import Pieces
from connect.store.distributed_store import MooncakeDistributedStore
from connect.store.replicate_config import ReplicateConfig
from tests.e2e.conftest import wait_until

ROOT = Path(__file__).resolve().parents[2]
SLOT = 64 << 10


@pytest.fixture(scope="module")
def pool(start):
    """Two copies of everything; the last test kills a node."""
    flags = ("--model", "none", "--value-bytes", "64K", "--dram-bytes", "96M", "--replicas", "2")
    with start("store=3", *flags) as cluster:
        yield cluster


def address(pool, name="store-0"):
    return pool[name].url.removeprefix("http://")


def opened(pool, **options):
    made = MooncakeDistributedStore()
    assert made.setup({"local_hostname": "localhost", "master_server_addr": address(pool)} | options) == 0
    return made


@pytest.fixture(scope="module")
def store(pool):
    made = opened(pool)
    yield made
    assert made.close() == 0
    assert made.close() == 0


@pytest.fixture(scope="module")
def other(pool):
    """Another client, which enters through another node."""
    made = opened(pool, master_server_addr=f"127.0.0.1:1, {address(pool, 'store-1')}")
    yield made
    made.close()


class Memory:
    """Memory of an engine."""

    def __init__(self, data: bytes | int) -> None:
        self.buffer = ctypes.create_string_buffer(data, data if isinstance(data, int) else len(data))
        self.address = ctypes.addressof(self.buffer)

    def pieces(self, *lengths: int) -> tuple[list[int], list[int]]:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        return [self.address + start for start in starts], list(lengths)


def test_every_form_of_setup(pool):
    for form in (
        ("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", address(pool)),
        ("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", address(pool), None),
        ({"local_hostname": "h", "master_server_address": address(pool), "global_segment_size": "4gb", "any": "1"},),
    ):
        made = MooncakeDistributedStore()
        assert made.setup(*form) == 0
        assert made.setup(*form) == 0
        assert made.health_check() == 0
        host, _, port = made.get_hostname().partition(":")
        assert host in ("localhost", "h") and port.isdigit()
        made.close()
        assert (made.health_check(), made.get("any")) == (1, b"")
    made = MooncakeDistributedStore()
    kept = dict(metadata_server="", local_buffer_size=0, protocol="tcp", rdma_devices="")  # noqa: C408
    assert made.setup(local_hostname="h", global_segment_size=0, master_server_addr=address(pool), **kept) == 0
    made.close()
    with pytest.raises(TypeError, match="unheard_of"):
        MooncakeDistributedStore().setup("h", "", 0, 0, "tcp", "", address(pool), unheard_of=1)
    assert MooncakeDistributedStore().setup({"local_hostname": "h", "global_segment_size": "much"}) == -600


def test_calls_before_setup_answer_a_code():
    made, memory = MooncakeDistributedStore(), Memory(10)
    assert (made.put("a", b"b"), made.put_from("a", memory.address, 10), made.is_exist("a")) == (-703,) * 3
    assert (made.get("a"), made.get_buffer("a"), made.get_batch(["a", "b"])) == (b"", None, [b"", b""])
    assert made.batch_put_from_multi_buffers(["a", "b"], [[1], [1]], [[1], [1]]) == [-703, -703]
    assert made.batch_get_session_start(["a"]) == [-703]
    assert (made.remove_all(), made.remove_by_regex("a"), made.health_check(), made.close()) == (-703, -703, 1, 0)
    named = dict(all_buffer_ptrs=[[1]], all_sizes=[[1]], keys=["a"])  # noqa: C408
    assert made.batch_get_into_multi_buffers(prefer_alloc_in_same_node=True, **named) == [-703], "in any order"


@pytest.mark.parametrize("nbytes", [1, 2, 100, SLOT - 200, SLOT, SLOT + 1, 5 * SLOT + 17, 3_000_000])
def test_values_of_every_size(store, other, nbytes):
    seed = nbytes
    print(f"seed {seed}")
    value = random.Random(seed).randbytes(nbytes)
    name = f"size/{nbytes}/" + "n" * (nbytes % 700)
    assert (store.is_exist(name), store.get_size(name), store.get(name)) == (0, -704, b"")
    assert store.put(name, value) == 0
    assert (other.is_exist(name), other.get_size(name)) == (1, nbytes)
    assert other.get(name) == value
    assert other.put(name, b"another") == 0
    assert store.get(name) == value, "the first writer wins"
    handle = other.get_buffer(name)
    assert (handle.size(), ctypes.string_at(handle.ptr(), nbytes), bytes(memoryview(handle))) == (nbytes, value, value)
    room = Memory(nbytes + 3)
    assert other.get_into(name, room.address, nbytes + 3) == nbytes
    assert room.buffer.raw[:nbytes] == value
    if nbytes > 1:
        assert other.get_into(name, room.address, nbytes - 1) == -600
    assert store.upsert(name, b"replaced") == 0
    assert other.get(name) == b"replaced"
    assert (store.remove(name), store.remove(name), other.is_exist(name)) == (0, -704, 0)


def test_values_of_many_pieces(store, other):
    """30 pieces a value, as vLLM writes them: into other pieces, and with a missing name among them."""
    chance = random.Random(3)
    keys = [f"vllm@{i}" for i in range(20)]
    values = [chance.randbytes(30 * 3000) for _ in keys]
    memory = [Memory(value) for value in values]
    rows = [one.pieces(*[3000] * 30) for one in memory]
    assert store.register_buffer(memory[0].address, 30 * 3000) == 0
    assert store.batch_put_from_multi_buffers(keys, [r[0] for r in rows], [r[1] for r in rows]) == [0] * 20
    assert other.batch_is_exist([*keys, "vllm@none"]) == [1] * 20 + [0]
    rooms = [Memory(30 * 3000) for _ in range(21)]
    rows = [one.pieces(50_000, 1, 39_999) for one in rooms]
    found = other.batch_get_into_multi_buffers([*keys, "vllm@none"], [r[0] for r in rows], [r[1] for r in rows])
    assert found == [90_000] * 20 + [-704]
    assert [room.buffer.raw for room in rooms[:20]] == values
    assert other.batch_get_buffer([keys[3], "none"]) == [bytearray(values[3]), None]
    assert store.batch_put_from_multi_buffers(keys, [], []) == [-600] * 20
    assert store.put_parts("parts", b"one", bytearray(b"two"), memoryview(b"three")) == 0
    assert other.get("parts") == b"onetwothree"
    assert store.unregister_buffer(memory[0].address) == 0
    assert store.unregister_buffer(memory[0].address) == -600


def test_batches(store, other):
    values = {f"batch/{i}": os.urandom(100 + i) for i in range(50)}
    assert store.put_batch(list(values), list(values.values())) == 0
    assert other.get_batch([*values, "none"]) == [*values.values(), b""]
    memory, room = Memory(b"abcdef"), Memory(3)
    twice = store.batch_put_from(["twice", "twice", "bad"], [memory.address, memory.address + 3, 0], [3, 3, 3])
    assert (twice, other.get("twice")) == ([0, 0, -600], b"abc")
    assert other.batch_get_into(["twice", "none"], [room.address] * 2, [3, 3]) == [3, -704]
    assert other.batch_get_into(["twice"], [], []) == [-600]
    assert store.batch_remove(["twice", "none"]) == [0, -704]


def test_what_no_value_can_be(store):
    assert [store.put("empty", b""), store.put("", b"value"), store.put("n" * SLOT, b"value")] == [-600] * 3
    assert [store.put("in strides", memoryview(b"abcdef")[::2]), store.put("\ud800", b"value")] == [-600] * 2
    for wrong in (
        lambda: store.put(1, b"value"),
        lambda: store.put("text", "text"),
        lambda: store.batch_is_exist("ab"),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_names_are_removed_by_pattern_and_by_tenant(pool, store, other):
    mine, theirs = opened(pool, tenant_id="mine"), opened(pool, tenant_id="theirs")
    large = os.urandom(3 * SLOT)
    for client in (mine, theirs):
        assert client.put_batch([f"layer-{i}@x" for i in range(30)], [b"v%d" % i for i in range(30)]) == 0
        assert client.put("large@x" + "y" * 2000, large) == 0
    assert store.get("layer-1@x") == b"", "another tenant's"
    assert (mine.remove_by_regex("["), mine.remove_by_regex("^none")) == (-600, 0)
    assert mine.remove_by_regex(r"layer-1\d@") == 10
    assert mine.batch_is_exist(["layer-1@x", "layer-10@x", "layer-20@x"]) == [1, 0, 1]
    assert mine.remove_by_regex("y{2000}$") == 1
    store.put("stays", b"here")
    before = objects(pool)
    assert mine.remove_all() == 20
    assert mine.remove_all() == 0
    assert theirs.get("large@x" + "y" * 2000) == large
    assert theirs.remove_all(force=True) == 31
    assert other.get("stays") == b"here"
    assert before - objects(pool) == 2 * (20 + 30 + 1 + 3), "with all parts and copies"
    mine.close()
    theirs.close()


def objects(pool) -> int:
    """Copies of blocks on all nodes."""
    return in_dram(pool, "blocks")


def in_dram(pool, name: str) -> int:
    with Store(address(pool)) as plain:
        homes = plain.stats()["homes"]
    assert len(homes) == 3
    return sum(stats["tiers"]["dram"][name] for stats in homes.values())


def test_sessions_read_and_write_ranges(store, other):
    value = os.urandom(6 * SLOT)
    memory, room = Memory(value), Memory(len(value))
    half = len(value) // 2
    assert store.batch_put_session_start(["s1", "s2", ""], [len(value), 10, 5]) == [0, 0, -600]
    assert store.batch_put_session_start(["s1"], [5]) == [-600]
    second_half = store.batch_put_from_multi_buffer_ranges(["s1"], [[memory.address + half]], [[half]], [[half]])
    assert (second_half, other.is_exist("s1")) == ([half], 0)
    assert store.batch_put_from_multi_buffer_ranges(["s1"], [[memory.address]], [[half]], [[0]]) == [half]
    beyond = store.batch_put_from_multi_buffer_ranges(
        ["s1", "s3"], [[memory.address]] * 2, [[9]] * 2, [[len(value)]] * 2
    )
    assert beyond == [-600, -600]
    assert store.batch_put_session_revoke(["s2", "s3"]) == [0, -600]
    assert store.batch_put_session_end(["s1", "s2"]) == [0, -600]
    assert store.batch_put_session_start(["s1"], [5]) == [-705]

    assert other.batch_get_session_start(["s1", "none"]) == [0, -704]
    for start in range(0, len(value), half):
        ptrs, sizes = [[room.address + start, room.address + start + 10]], [[10, half - 10]]
        assert other.batch_get_into_multi_buffer_ranges(["s1"], ptrs, sizes, [[start, start + 10]]) == [half]
    assert room.buffer.raw == value
    assert other.batch_get_into_multi_buffer_ranges(["s1"], [[room.address]], [[2]], [[len(value) - 1]]) == [-600]
    assert other.batch_get_session_end(["s1"]) == 0
    assert other.batch_get_into_multi_buffer_ranges(["s1"], [[room.address]], [[2]], [[0]]) == [-600]


def test_descriptions_of_replicas(store):
    store.put("described", b"value")
    found = store.batch_get_replica_desc(["described", "none"])
    assert list(found) == ["described"]
    (replica,) = found["described"]
    assert (replica.is_memory_replica(), replica.is_disk_replica(), replica.is_local_disk_replica()) == (
        True,
        False,
        False,
    )
    assert store.get_replica_desc("none") == []


def test_a_hard_pin_is_kept(store, pool):
    config = ReplicateConfig()
    config.with_hard_pin, config.replica_num, config.anything = True, 5, "else"
    assert store.put("pinned", b"value", config) == 0
    assert in_dram(pool, "pinned") == 3, "every copy is, and there are three nodes"
    assert store.remove("pinned", force=True) == 0


def test_a_full_pool_answers_no_room(pool, store):
    """Pinned values are never evicted, and a node keeps a limited number of them."""
    config = ReplicateConfig(with_hard_pin=True)
    names = [f"full/{i}" for i in range(3000)]
    room = Memory(60_000)
    ends = store.batch_put_from(names, [room.address] * len(names), [60_000] * len(names), config)
    assert set(ends) == {0, -200}
    assert store.remove_by_regex("^full/") > 0


def test_threads_share_one_client(store):
    failures = []

    def work(number: int) -> None:
        for i in range(30):
            value = b"%d-%d" % (number, i)
            if store.put(f"threads/{number}/{i}", value) or store.get(f"threads/{number}/{i}") != value:
                failures.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_bare_interpreter_uses_upstreams_names(pool):
    """From connect/site, without the checkout on its path; the program's own modules stay its own."""
    code = (
        "import sys, time; before = list(sys.path); begun = time.perf_counter()\n"
        "from mooncake.store import MooncakeDistributedStore, ReplicateConfig\n"
        "print(f'{time.perf_counter() - begun:.2f} s', file=sys.stderr)\n"
        "import sched\n"
        "store = MooncakeDistributedStore()\n"
        f"print(store.setup('localhost', 'P2PHANDSHAKE', 0, 0, 'tcp', '', {address(pool)!r}))\n"
        "print(store.put('bare', b'value'), store.get('bare'), store.close())\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print('scheduler' in dir(sched), sys.path == before, sorted(tops & {'engine', 'cache', 'net', 'connect'}))\n"
        "print(sorted(name for name in sys.modules if name.startswith('mooncake_rooms.sched') or name == 'torch'))\n"
    )
    done = bare(code)
    print(done.stderr)
    assert done.stdout == "0\n0 b'value' 0\nTrue True []\n[]\n", done.stderr


def bare(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "connect" / "site")} | env
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120)


FORKS = """
import os, signal, sys, time
from mooncake.store import MooncakeDistributedStore
LENT = 30_000  # bytes: such values go into slots that the home has lent to this process
given = {"local_hostname": "h", "master_server_addr": sys.argv[1]}
store = MooncakeDistributedStore()
assert store.setup(given) == 0

def value(name):
    return name.encode() * (LENT // len(name))

def all_arrive(names):
    for name in names:
        assert store.put(name, value(name)) == 0
        assert store.get(name) == value(name), name

before, parents, childs = ([f"{who}{i:03}" for i in range(30)] for who in "bpc")
all_arrive(before)
time.sleep(1)  # slots were lent meanwhile
child = os.fork()
if not child:
    signal.alarm(60)  # a call without an answer waits for ever
    code = 1
    try:
        assert (store.get("b000"), store.put("x", b"y"), store.is_exist("b000"), store.close()) == (b"", -703, -703, 0)
        assert store.setup(given) == 0
        all_arrive(childs)
        assert store.close() == 0
        code = 0
    finally:
        os._exit(code)
all_arrive(parents)
assert os.waitpid(child, 0)[1] == 0
assert [name for name in before + parents + childs if store.get(name) != value(name)] == []
print("done")
"""


@pytest.mark.parametrize("tcp", ["", "1"])
def test_a_forked_child_needs_a_setup_of_its_own(pool, tcp):
    """With the connections and lent slots of its parent it would take answers and slots away from it."""
    ran = bare(FORKS, address(pool), MC_FORCE_TCP=tcp)
    assert (ran.stdout, ran.returncode) == ("done\n", 0), ran.stderr


def test_close_waits_for_a_get_in_another_thread(pool):
    """It unmaps the memory that the get copies from."""
    made = opened(pool)
    value = os.urandom(SLOT // 2)
    made.put("read while closing", value)
    wait_until(lambda: made.get("read while closing") == value, "the value is there")
    client, room, found = made._client, Memory(len(value)), []
    inside = threading.Event()

    def target(position: int, nbytes: int) -> Pieces:
        inside.set()
        wait_until(lambda: not client.ready, "close has begun")
        closing.join(0.5)
        found.append(closing.is_alive())
        return Pieces([(room.address, nbytes)])

    getting = threading.Thread(target=lambda: found.append(client.get(["read while closing"], target)))
    closing = threading.Thread(target=made.close)
    getting.start()
    assert inside.wait(30)
    closing.start()
    getting.join(30)
    closing.join(30)
    assert found == [True, [len(value)]]
    assert room.buffer.raw == value


def test_a_store_that_is_dropped_leaves_the_pool(pool):
    def ours_open() -> int:
        return sum(thread.name == "mooncake-store" for thread in threading.enumerate())

    before = ours_open()
    made = opened(pool)
    made.put("dropped", os.urandom(SLOT // 2))
    assert ours_open() == before + 1
    del made
    gc.collect()
    wait_until(lambda: ours_open() == before, "its thread has ended")


@pytest.mark.expects_error("127.0.0.1:1")
def test_setup_without_a_node_answers_a_code(caplog):
    made = MooncakeDistributedStore()
    assert made.setup("localhost", "", 0, 0, "tcp", "", "127.0.0.1:1") == -900
    assert "127.0.0.1:1" in caplog.text
    assert made.get("any") == b""


def test_a_lost_node_costs_no_value(pool, store, other):
    values = {f"lost/{i}": os.urandom(SLOT * (i % 3) + 10) for i in range(30)}
    assert store.put_batch(list(values), list(values.values())) == 0
    pool.kill("store-2", signal.SIGKILL)
    assert other.get_batch(list(values)) == list(values.values())
    assert store.health_check() == 0
