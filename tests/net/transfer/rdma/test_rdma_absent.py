"""Machines without RDMA: one line of why, and another transport."""

from types import SimpleNamespace

import pytest

from net import compiled
from net.channel.channel import Channel
from net.compiled import NotCompiled
from net.errors import PeerRefused
from net.transfer.common.memory import Region
from net.transfer.common.topology import Nic, Topology
from net.transfer.engine import Op, TransferEngine, TransferError
from net.transfer.rdma import build, verbs


@pytest.fixture
def no_device(monkeypatch, tmp_path):
    monkeypatch.setattr(verbs, "SYSFS", tmp_path / "nothing")


async def nodes(order, options=None):
    made = []
    for name in "ab":
        channel = Channel(name, {})
        engine = TransferEngine(channel, order, options)
        await channel.start("127.0.0.1")
        made.append((channel, engine))
    made[0][0].introduce("b", made[1][0].links.address)
    return made


async def test_the_reason_stands_in_the_path(no_device):
    (channel, engine), (other_channel, other) = await nodes(["rdma", "tcp"])
    with Region.shared("x", 4096) as ours, Region.shared("y", 4096) as theirs:
        engine.register(ours)
        other.register(theirs)
        done = await engine.submit("b", Op.WRITE, "x", "y", [(0, 0, 10)])
        assert done.transport == "tcp"
        assert engine.path_of("b").refused == {
            "rdma": "this machine has no RDMA device (nothing in /sys/class/infiniband)"
        }
        for part in (engine, other, channel, other_channel):
            await part.close()


async def test_asking_for_nothing_else_is_a_clear_error(no_device):
    (channel, engine), (other_channel, other) = await nodes(["rdma"])
    with pytest.raises(TransferError, match="no transport to 'b': rdma: this machine has no RDMA device"):
        await engine.open("b")
    for part in (engine, other, channel, other_channel):
        await part.close()


def test_no_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(NotCompiled, match="apt install gcc libibverbs-dev"):
        build.compile_to(tmp_path / "module.so")


def test_a_failing_compile_names_its_first_error(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'x.c:1: fatal error: infiniband/verbs.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(NotCompiled, match=r"libibverbs-dev\): .*verbs.h"):
        build.module()
    assert list(compiled.folder("verbs").iterdir()) == []


async def test_regions_name_the_cards_near_them(monkeypatch):
    channel = Channel("a", {})
    engine = TransferEngine(channel, ["rdma"])
    transport = engine._transports["rdma"]
    with Region.private("x", 4096) as region:
        region.place = "numa:1"
        engine.register(region)
        assert engine.regions() == {"x": {"nbytes": 4096, "place": "numa:1", "nics": []}}, "none is in use yet"
        monkeypatch.setattr(transport, "_devices", [SimpleNamespace(name="far"), SimpleNamespace(name="near")])
        monkeypatch.setattr(transport, "_topology", Topology([Nic("far", 0), Nic("near", 1)]))
        assert engine.regions()["x"]["nics"] == ["near"]
        monkeypatch.undo()
        await engine.close()
        await channel.close()


async def test_what_must_be_sealed_does_not_go_by_rdma():
    (channel, engine), (other_channel, other) = await nodes(["rdma", "tcp"], {"rdma": {"sealed_only": True}})
    path = await engine.open("b")
    assert path.transport == "tcp"
    assert "--rdma-plaintext" in path.refused["rdma"] and "unencrypted" in path.refused["rdma"]
    assert "--rdma-plaintext" in other._transports["rdma"].offer()["refused"], "peers are told, too"
    with pytest.raises(PeerRefused, match="no 'rdma' connections"):
        await channel.links.dial("b", "rdma")
    for part in (engine, other, channel, other_channel):
        await part.close()
