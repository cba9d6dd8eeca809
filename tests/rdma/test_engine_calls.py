"""Upstream's transfer engine calls over RDMA: memory that two programs have registered, on two rails."""

from __future__ import annotations

import os
import random

import pytest

from connect.engine.transfer_engine import TransferEngine, TransferNotify, TransferOpcode
from tests.engine_peer import EnginePeer, memory
from tests.rdma.nodes import SIDES

LAYERS, LAYER = 6, 700_001
ENV = {"MOONCAKE_CMA": "0"}  # both programs run on one host


@pytest.fixture(scope="module")
def engine():
    before = os.environ.get("MOONCAKE_CMA")
    os.environ |= ENV
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", ",".join(SIDES["a"])) == 0
    yield made
    os.environ.pop("MOONCAKE_CMA")
    if before is not None:
        os.environ["MOONCAKE_CMA"] = before


@pytest.fixture(scope="module")
def peer():
    made = EnginePeer(ENV, "rdma", ",".join(SIDES["b"]))
    yield made
    made.end()


def moved(engine, peer) -> list[int]:
    """Bytes that each rail to the peer has moved."""
    core = engine._core
    node_id = core.known(peer.session).node_id
    assert core._transfer.path_of(node_id).transport == "rdma"
    return [rail.moved for rail in core._transfer._transports["rdma"]._peers[node_id].rails]


def test_layers_go_there_and_come_back_on_both_rails(engine, peer):
    seed = 4
    print(f"seed {seed}")
    chance = random.Random(seed)
    layers = [memory(LAYER) for _ in range(LAYERS)]
    there = [peer.ask("new", LAYER) for _ in range(LAYERS)]
    assert [code for _, code in there] == [0] * LAYERS
    assert engine.batch_register_memory([at for _, at in layers], [LAYER] * LAYERS) == 0
    contents = [chance.randbytes(LAYER) for _ in layers]
    rows = []
    for (made, at), (remote, _), content in zip(layers, there, contents, strict=True):
        made.raw = content
        rows += [(at + start, remote + start, min(100_000, LAYER - start)) for start in range(0, LAYER, 100_000)]
    chance.shuffle(rows)
    assert engine.batch_transfer_sync_write(peer.session, *zip(*rows, strict=True)) == 0
    whole, into = memory(LAYER)
    for (remote, _), content in zip(there, contents, strict=True):
        assert engine.transfer_sync_read(peer.session, into, remote, LAYER) == 0, "local memory is not registered"
        assert whole.raw == content
    by_rail = moved(engine, peer)
    assert sum(by_rail) == 2 * LAYERS * LAYER and min(by_rail) > 0
    notice = TransferNotify("layers", "all")
    (_, at), (remote, _) = layers[0], there[0]
    assert engine.transfer_sync(peer.session, at, remote, 10, TransferOpcode.Write, notice) == 0
    assert peer.ask("notices") == [["layers", "all"]]
    batch = engine.batch_transfer_async_read(peer.session, [into], [remote], [LAYER])
    assert engine.get_batch_transfer_status([batch]) == 0 and whole.raw == contents[0]
    assert engine.batch_unregister_memory([at for _, at in layers]) == 0


def test_what_is_not_registered_is_refused_and_the_rails_stay(engine, peer):
    remote, _ = peer.ask("new", 5000)
    source, at = memory(5000)
    source.raw = os.urandom(5000)
    engine.register_memory(at, 5000)
    write, read = engine.transfer_sync_write, engine.transfer_sync_read
    assert write(peer.session, at, remote, 5000) == 0
    assert [write(peer.session, at, remote, 5001), write(peer.session, at, remote - 1, 5)] == [-1, -1]
    assert [write(peer.session, at, 64, 5), read(peer.session, at, 64, 5)] == [-1, -1]
    later, _ = peer.ask("new", 4000)
    assert write(peer.session, at, later, 4000) == 0, "memory that was registered after the first transfer"
    assert peer.ask("forget", later) == 0
    assert write(peer.session, at, later, 4000) == -1
    assert read(peer.session, at, remote, 5000) == 0
    before = moved(engine, peer)
    assert write(peer.session, at, remote, 5000) == 0
    assert sum(moved(engine, peer)) == sum(before) + 5000
    assert engine.unregister_memory(at) == 0
    assert [engine.register_memory(4096, 4096) for _ in range(2)] == [-1, -1], "nothing is mapped there"


def test_a_program_that_ends_costs_a_code_and_its_successor_works(engine):
    first = EnginePeer(ENV, "rdma", ",".join(SIDES["b"]))
    remote, _ = first.ask("new", 3 << 20)
    source, at = memory(3 << 20)
    source.raw = os.urandom(3 << 20)
    assert engine.transfer_sync_write(first.session, at, remote, 3 << 20) == 0
    first.end()
    assert engine.transfer_sync_write(first.session, at, remote, 3 << 20) == -1
    assert engine.send_probe(first.session) == -102
    second = EnginePeer(ENV, "rdma", ",".join(SIDES["b"]))
    try:
        remote, _ = second.ask("new", 3 << 20)
        target, into = memory(3 << 20)
        assert engine.transfer_sync_write(second.session, at, remote, 3 << 20) == 0
        assert engine.transfer_sync_read(second.session, into, remote, 3 << 20) == 0
        assert target.raw == source.raw and sum(moved(engine, second)) == 6 << 20
    finally:
        second.end()


def test_a_program_without_rdma_is_reached_over_tcp(engine):
    other = EnginePeer(ENV, "tcp")
    try:
        remote, _ = other.ask("new", 5000)
        source, at = memory(5000)
        target, into = memory(5000)
        source.raw = os.urandom(5000)
        assert engine.transfer_sync_write(other.session, at, remote, 5000) == 0
        assert engine.transfer_sync_read(other.session, into, remote, 5000) == 0
        assert target.raw == source.raw and not engine._core.known(other.session).by_rdma
    finally:
        other.end()
