"""A cluster key through the whole of net/: transfers, gossip, and the memory of a neighbour on the same host."""

import asyncio
import os
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from net.channel.channel import Channel
from net.channel.cluster_key import ClusterKey
from net.errors import ONE_KEY
from net.gossip.driver import Gossip
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine
from net.transfer.shm.lifeline import Lifeline, connect
from sched.gossip.state import NodeRecord
from sched.membership.member import Member, presets
from tests.net.peers import until

MIB = 1 << 20
SIZE = 6 * MIB


@pytest.fixture
def key(tmp_path):
    (tmp_path / "key").write_text("5c" * 32)
    (tmp_path / "key").chmod(0o600)
    return ClusterKey(tmp_path / "key")


@asynccontextmanager
async def two(transport, key):
    """(engine, region) of a and of b."""
    async with AsyncExitStack() as stack:
        out, addresses = [], []
        for name in ("a", "b"):
            channel = Channel(name, {}, cluster_key=key)
            engine = TransferEngine(channel, [transport])
            region = stack.enter_context(Region.shared(f"of-{name}", SIZE))
            engine.register(region)
            stack.push_async_callback(channel.close)
            stack.push_async_callback(engine.close)
            addresses.append(await channel.start("127.0.0.1"))
            out.append((engine, region, channel))
        out[0][2].introduce("b", addresses[1])
        yield [side[:2] for side in out]


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_transfers_under_a_key(key, transport, op):
    """Large and small, whole and scattered: sealed records need not meet the ends of spans."""
    async with two(transport, key) as ((a, ours), (_, theirs)):
        rng = random.Random(op.value)
        source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
        source.memory[:] = rng.randbytes(SIZE)
        cells = [(i * 60_000, i * 60_000, rng.randrange(1, 60_000)) for i in range(SIZE // 60_000)]
        rng.shuffle(cells)
        for spans in ([(0, 0, SIZE)], [(5, 5, 300_001)], cells, [(7, 7, 1)]):
            target.memory[:] = bytes(SIZE)
            await a.submit("b", op, "of-a", "of-b", spans)
            for _, offset, length in spans:
                assert target.memory[offset : offset + length] == source.memory[offset : offset + length]


async def test_a_stranger_at_the_socket_gets_no_memory(key):
    """It can connect, for it is the same user; it does not know the token, which only sealed connections carry."""
    async with two("shm", key) as (_, (b, _)):
        offer = b._transports["shm"].offer()
        said = []
        stranger = Lifeline(connect(offer["path"]), lambda _, *message: said.append(message), lambda _: None)
        stranger.send({"node": "a", "nonce": "00"})
        await until(lambda: said)
        assert set(said[0][0]) == {"nonce", "proof"} and offer["token"] not in str(said)
        stranger.send({"proof": said[0][0]["proof"]})  # reflected
        await until(lambda: len(said) > 1)
        assert "refused" in said[1][0]
        stranger.send({"region": "of-b"})
        await asyncio.sleep(0.05)
        assert all(memfd is None for _, memfd in said)
        stranger.close()


async def test_gossip_with_and_without_the_key(key, caplog):
    async with AsyncExitStack() as stack:

        async def node(name, its_key):
            me = Member(name, ("127.0.0.1", 0), "127.0.0.1:1", ("prefill",), info={"root": "aa"})
            gossip = Gossip(me, presets["local"], random.Random(os.urandom(8)), NodeRecord, its_key)
            await stack.enter_async_context(gossip)
            return gossip, await gossip.start("127.0.0.1", 0)

        first, address = await node("first", key)
        second, _ = await node("second", key)
        await second.join(address)
        await until(lambda: {member.node_id for member in first.members} == {"first", "second"})
        stranger, _ = await node("stranger", None)
        with pytest.raises(TimeoutError):
            await stranger.join(address, timeout_s=0.5)
        assert {member.node_id for member in first.members} == {"first", "second"}
        await until(lambda: any(ONE_KEY in record.getMessage() for record in caplog.records))
