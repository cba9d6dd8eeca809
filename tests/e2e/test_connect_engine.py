"""Upstream's transfer engine calls between two programs of this host, over TCP and from process to process."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from connect.engine.transfer_engine import TransferEngine, TransferNotify, TransferOpcode
from net.transfer.tcp import blocking_calls
from tests.e2e.conftest import wait_until
from tests.engine_peer import EnginePeer, memory

NBYTES = 3 << 20


@pytest.fixture(params=["process to process", "tcp"])
def transport(request, monkeypatch) -> str:
    if request.param == "tcp":
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    else:
        monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    return request.param


@pytest.fixture
def peer(transport) -> Iterator[EnginePeer]:
    made = EnginePeer({"MC_FORCE_TCP": os.environ["MC_FORCE_TCP"]} if transport == "tcp" else {})
    yield made
    made.end()


@pytest.fixture
def engine(transport) -> TransferEngine:
    made = TransferEngine()
    assert (made.get_rpc_port(), made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")) == (0, 0)
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    assert made.get_rpc_port() > 0
    return made


def test_bytes_go_there_and_come_back(engine, peer, transport):
    seed = 5
    print(f"seed {seed}")
    chance = random.Random(seed)
    there, code = peer.ask("new", NBYTES)
    assert code == 0
    source, at = memory(NBYTES)
    target, into = memory(NBYTES)
    source.raw = content = chance.randbytes(NBYTES)
    assert engine.batch_register_memory([at, into], [NBYTES, NBYTES]) == 0
    assert engine.transfer_sync_write(peer.session, at, there, NBYTES) == 0
    assert engine.transfer_sync_read(peer.session, into, there, NBYTES) == 0
    assert target.raw == content
    spans = [
        (chance.randrange(NBYTES - 999), chance.randrange(NBYTES - 999), chance.randrange(999)) for _ in range(1500)
    ]
    ends = [
        engine.batch_transfer_sync_read(peer.session, *zip(*[(into + a, there + b, n)], strict=True))
        for a, b, n in spans
    ]
    assert set(ends) == {0}
    expected = bytearray(content)
    for a, b, n in spans:
        expected[a : a + n] = content[b : b + n]
    assert target.raw == expected
    pieces = [(i * 700, (1499 - i) * 700, 700) for i in range(1500)]  # more than one call of the kernel takes
    rows = [[into + a for a, _, _ in pieces], [there + b for _, b, _ in pieces], [n for _, _, n in pieces]]
    assert engine.batch_transfer_sync_read(peer.session, *rows) == 0
    assert all(target.raw[a : a + n] == content[b : b + n] for a, b, n in pieces)
    used = engine._core.known(peer.session).process
    assert (used is None) == (transport == "tcp")
    assert engine.batch_unregister_memory([at, into]) == 0
    assert engine.transfer_sync_read(peer.session, into, there, 100) == 0, "local memory need not be registered"


def test_only_registered_memory_is_touched(engine, peer):
    there, _ = peer.ask("new", NBYTES)
    _, at = memory(NBYTES)
    write = engine.transfer_sync_write
    assert engine.register_memory(at, NBYTES) == 0
    assert (engine.register_memory(at, 10), engine.register_memory(at + 5, 10)) == (-7, -7)
    assert write(peer.session, at, there + NBYTES - 10, 10) == 0
    assert [write(peer.session, at, there + NBYTES - 10, 11), write(peer.session, at, there - 1, 5)] == [-1, -1]
    assert [write(peer.session, at, 64, 5), write("127.0.0.1:1", at, there, 5)] == [-1, -1]
    assert write("nonsense", at, there, 5) == -1
    second, _ = peer.ask("new", 100)
    assert write(peer.session, at, second, 100) == 0, "memory that was registered after the first transfer"
    assert peer.ask("forget", second) == 0
    assert write(peer.session, at, second, 100) == -1
    assert (engine.unregister_memory(at), engine.unregister_memory(at)) == (0, -3)
    assert engine.batch_transfer_sync_write(peer.session, [], [], []) == 0
    assert engine.batch_transfer_sync_write(peer.session, [at], [there], [5, 5]) == -1


def test_batches_that_run_meanwhile(engine, peer):
    there, _ = peer.ask("new", NBYTES)
    source, at = memory(NBYTES)
    target, into = memory(NBYTES)
    source.raw = os.urandom(NBYTES)
    engine.batch_register_memory([at, into], [NBYTES, NBYTES])
    batch = engine.batch_transfer_async_write(peer.session, [at], [there], [NBYTES])
    assert batch > 0
    while (status := engine.transfer_check_status(batch)) == 0:
        time.sleep(0.001)
    assert (status, engine.transfer_check_status(batch)) == (1, -1), "the first answer frees it"
    reads = [engine.batch_transfer_async_read(peer.session, [into], [there], [NBYTES]) for _ in range(5)]
    assert engine.get_batch_transfer_status(reads) == 0
    assert engine.get_batch_transfer_status(reads) == -1, "a freed id is a code, not a crash"
    assert target.raw == source.raw
    bad = engine.batch_transfer_async_read(peer.session, [into], [64], [100])
    assert engine.get_batch_transfer_status([bad]) == -1
    assert engine.batch_transfer_async_read(peer.session, [into], [there, there], [100]) == 0


def test_notices_probes_and_managed_buffers(engine, peer):
    there, _ = peer.ask("new", 100)
    buffer = engine.allocate_managed_buffer(100)
    assert engine.write_bytes_to_buffer(buffer, b"five!", 5) == 0
    notice = TransferNotify("name", "message")
    assert engine.transfer_sync(peer.session, buffer, there, 5, TransferOpcode.Write, notice) == 0
    assert peer.ask("notices") == [["name", "message"]]
    assert peer.ask("notices") == []
    assert engine.get_notifies() == []
    assert engine.transfer_sync(peer.session, buffer + 50, there, 5, TransferOpcode.Read) == 0
    assert engine.read_bytes_from_buffer(buffer + 50, 5) == b"five!"
    assert engine.get_first_buffer_address(peer.session) == there
    assert (engine.free_managed_buffer(buffer, 100), engine.free_managed_buffer(buffer, 100)) == (0, -1)
    assert (engine.send_probe(peer.session), engine.send_probe("127.0.0.1:1")) == (0, -102)
    session = peer.session
    peer.end()
    assert engine.transfer_sync_write(session, buffer, there, 5) == -1
    assert engine.send_probe(session) == -102


def test_a_transfer_to_itself(engine):
    (source, at), (target, into) = memory(100), memory(100)
    source.raw = os.urandom(100)
    engine.register_memory(into, 100)
    assert engine.transfer_sync_write(f"127.0.0.1:{engine.get_rpc_port()}", at, into, 100) == 0
    assert target.raw == source.raw


@pytest.mark.expects_error("no port 99999")
def test_calls_before_initialize_answer_a_code():
    made, (_, at) = TransferEngine(), memory(10)
    assert (made.register_memory(at, 10), made.transfer_sync_write("127.0.0.1:1", at, at, 10)) == (-1, -1)
    assert (made.batch_transfer_async_read("127.0.0.1:1", [at], [at], [1]), made.transfer_check_status(1)) == (0, -1)
    assert made.initialize("127.0.0.1:99999", "P2PHANDSHAKE", "tcp", "") == -1
    assert (made.get_notifies(), made.send_probe("127.0.0.1:1"), made.get_first_buffer_address("a:1")) == ([], -1, 0)


@pytest.mark.parametrize("transport", ["process to process"], indirect=True)
def test_a_kernel_that_forbids_it_means_tcp(monkeypatch, caplog, engine, peer, transport):
    """As with ptrace_scope: one line says so, and the bytes arrive."""
    from net.transfer.cma.process import OtherProcess

    def refused(self) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(OtherProcess, "count", refused)
    there, _ = peer.ask("new", 100)
    source, at = memory(100)
    target, into = memory(100)
    source.raw = os.urandom(100)
    with caplog.at_level(logging.INFO, logger="mooncake.connect"):
        assert engine.transfer_sync_write(peer.session, at, there, 100) == 0
        assert engine.transfer_sync_read(peer.session, into, there, 100) == 0
    assert target.raw == source.raw
    assert caplog.text.count("ptrace_scope") == 1


tcp = pytest.mark.parametrize("transport", ["tcp"], indirect=True)


@tcp
def test_pieces_of_all_sizes_and_a_value_of_many_frames(engine, peer, transport):
    seed = 9
    print(f"seed {seed}")
    chance = random.Random(seed)
    nbytes = 24 << 20
    there, _ = peer.ask("new", nbytes)
    source, at = memory(nbytes)
    target, into = memory(nbytes)
    source.raw = content = chance.randbytes(nbytes)
    lengths = [chance.choice((1, 7, 30)) for _ in range(3000)] + [5000, 40_000] * 20 + [9 << 20]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    order = list(range(len(lengths)))
    chance.shuffle(order)
    rows = [(at + starts[i], there + starts[i], lengths[i]) for i in order]
    assert engine.batch_transfer_sync_write(peer.session, *zip(*rows, strict=True)) == 0
    used = sum(lengths)
    assert engine.transfer_sync_read(peer.session, into, there, used) == 0
    assert target.raw[:used] == content[:used]
    rows = [(into + starts[i], there + starts[i], lengths[i]) for i in order]
    target.raw = bytes(nbytes)
    assert engine.batch_transfer_sync_read(peer.session, *zip(*rows, strict=True)) == 0
    assert target.raw[:used] == content[:used]
    second, code = peer.ask("new", 100)
    assert code == 0
    assert engine.batch_transfer_sync_write(peer.session, [at, at], [there, second], [50, 100]) == 0
    assert engine.batch_transfer_sync_write(peer.session, [at, at], [there, second], [50, 101]) == -1
    assert engine.transfer_sync_read(peer.session, into, second, 100) == 0
    assert target.raw[:100] == content[:100]


@tcp
def test_a_connection_that_has_ended_meanwhile_costs_a_new_one(engine, peer, transport, monkeypatch):
    there, _ = peer.ask("new", 100)
    source, at = memory(100)
    target, into = memory(100)
    source.raw = os.urandom(100)
    write, read = engine.transfer_sync_write, engine.transfer_sync_read
    assert write(peer.session, at, there, 100) == 0
    [idle] = engine._mover._calls._idle.values()
    [first] = idle
    assert write(peer.session, at, there, 100) == 0 and list(idle) == [first]
    monkeypatch.setattr(blocking_calls, "LOOK_AFTER_S", 0.0)
    first._sock.shutdown(socket.SHUT_RDWR)
    assert write(peer.session, at, there, 100) == 0 and first not in idle
    monkeypatch.setattr(blocking_calls, "LOOK_AFTER_S", 100.0)
    idle[0]._sock.shutdown(socket.SHUT_RDWR)  # nobody looks: the question fails
    assert write(peer.session, at, there, 100) == -1, "its bytes may land late, so it is not asked again"
    assert read(peer.session, into, there, 100) == 0, "the event loop asks while threads do not"
    assert target.raw == source.raw


@tcp
def test_rdma_without_a_device_is_tcp_and_the_log_says_so(transport, peer, monkeypatch, caplog):
    monkeypatch.delenv("MC_FORCE_TCP")
    monkeypatch.setenv("MOONCAKE_CMA", "0")
    engine = TransferEngine()
    with caplog.at_level(logging.WARNING, logger="mooncake.connect"):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "none0,none1") == 0
    assert "use TCP and not RDMA" in caplog.text
    there, _ = peer.ask("new", 100)
    source, at = memory(100)
    target, into = memory(100)
    source.raw = os.urandom(100)
    assert engine.transfer_sync_write(peer.session, at, there, 100) == 0
    assert engine.transfer_sync_read(peer.session, into, there, 100) == 0
    assert target.raw == source.raw
    assert not engine._core.known(peer.session).by_rdma


def test_a_forked_child_needs_an_initialize_of_its_own(engine, peer):
    """With the connections of its parent it would take answers away from it."""
    there, _ = peer.ask("new", 100)
    (source, at), (target, into) = memory(100), memory(100)
    source.raw = os.urandom(100)
    assert engine.transfer_sync_write(peer.session, at, there, 100) == 0
    child = os.fork()
    if not child:
        signal.alarm(60)  # a call without an answer waits for ever
        calls = (
            engine.transfer_sync_read(peer.session, into, there, 100),
            engine.register_memory(at, 100),
            engine.send_probe(peer.session),
            engine.get_rpc_port(),
        )
        os._exit(calls != (-1, -1, -1, 0))
    assert os.waitpid(child, 0)[1] == 0
    assert engine.transfer_sync_read(peer.session, into, there, 100) == 0
    assert target.raw == source.raw


def test_a_dropped_engine_leaves_no_descriptors(transport):
    def opened() -> set[str]:
        return {one.name for one in Path("/proc/self/fd").iterdir()}

    before = opened()
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert opened() > before
    del made
    gc.collect()
    wait_until(lambda: opened() <= before, "its descriptors are closed")


def test_a_managed_buffer_is_memory_until_peers_cannot_reach_it(engine, monkeypatch):
    buffer = engine.allocate_managed_buffer(100)
    memory_of_it, unregister = weakref.ref(engine._buffers[buffer]), engine.unregister_memory
    there: list[bool] = []

    def watched(address: int) -> int:
        there.append(memory_of_it() is not None)
        return unregister(address)

    monkeypatch.setattr(engine, "unregister_memory", watched)
    assert engine.free_managed_buffer(buffer, 100) == 0
    assert (there, memory_of_it()) == ([True], None)
    assert engine.allocate_managed_buffer(1 << 60) == 0
