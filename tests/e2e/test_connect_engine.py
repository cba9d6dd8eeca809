"""Upstream's transfer engine calls between two programs of this host, over TCP and from process to process."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from connect.engine.transfer_engine import TransferEngine, TransferNotify, TransferOpcode
from lab.conformance.answers import ours

NBYTES = 3 << 20

PEER = """
import ctypes, json, sys
from mooncake.engine import TransferEngine
engine, memory = TransferEngine(), {}
print(json.dumps([engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), engine.get_rpc_port()]), flush=True)
for line in sys.stdin:
    command, *values = json.loads(line)
    if command == "new":
        made = ctypes.create_string_buffer(values[0])
        memory[ctypes.addressof(made)] = made
        answer = [ctypes.addressof(made), engine.register_memory(ctypes.addressof(made), values[0])]
    elif command == "forget":
        answer = engine.unregister_memory(values[0])
    elif command == "notices":
        answer = [[one.name, one.msg] for one in engine.get_notifies()]
    print(json.dumps(answer), flush=True)
"""


class Peer:
    """Another program."""

    def __init__(self, env: dict[str, str]) -> None:
        command = [sys.executable, "-P", "-c", PEER]
        self.process = subprocess.Popen(
            command, env=ours() | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )
        code, port = self._line()
        assert code == 0
        self.session = f"127.0.0.1:{port}"

    def ask(self, *question: object) -> object:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self):
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["process to process", "tcp"])
def transport(request, monkeypatch) -> str:
    if request.param == "tcp":
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    else:
        monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    return request.param


@pytest.fixture
def peer(transport) -> Iterator[Peer]:
    made = Peer({"MC_FORCE_TCP": os.environ["MC_FORCE_TCP"]} if transport == "tcp" else {})
    yield made
    made.end()


@pytest.fixture
def engine(transport) -> TransferEngine:
    made = TransferEngine()
    assert (made.get_rpc_port(), made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")) == (0, 0)
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    assert made.get_rpc_port() > 0
    return made


def memory(nbytes: int = NBYTES):
    made = ctypes.create_string_buffer(nbytes)
    return made, ctypes.addressof(made)


def test_bytes_go_there_and_come_back(engine, peer, transport):
    seed = 5
    print(f"seed {seed}")
    chance = random.Random(seed)
    there, code = peer.ask("new", NBYTES)
    assert code == 0
    source, at = memory()
    target, into = memory()
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
    _, at = memory()
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
    source, at = memory()
    target, into = memory()
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


def test_calls_before_initialize_answer_a_code():
    made, (_, at) = TransferEngine(), memory(10)
    assert (made.register_memory(at, 10), made.transfer_sync_write("127.0.0.1:1", at, at, 10)) == (-1, -1)
    assert (made.batch_transfer_async_read("127.0.0.1:1", [at], [at], [1]), made.transfer_check_status(1)) == (0, -1)
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
