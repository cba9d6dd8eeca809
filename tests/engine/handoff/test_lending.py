"""A prefix read out of another node's arena: bytes, ends of loans, and whose blocks are held when."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.pool.block_pool import BlockPool
from engine.handoff import messages
from engine.handoff.borrowing import Borrowing
from engine.handoff.lending import MAX_LENT_SHARE, Lending
from net.errors import RemoteError
from net.transfer.common.memory import Region
from net.transfer.engine import TransferEngine
from tests.net.peers import channels, until

GEOMETRY, BLOCKS = BlockGeometry(4, 2, 8, 8, "float32"), 16
SIZE = GEOMETRY.block_bytes
KEYS = [bytes([i]) * 16 for i in range(6)]


class GatedTransfer(TransferEngine):
    """READs wait until they are let through."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reading = 0

    async def submit(self, *arguments: Any, **options: Any) -> Any:
        self.reading += 1
        try:
            await self.gate.wait()
            return await super().submit(*arguments, **options)
        finally:
            self.reading -= 1


class Side:
    """A node's arena without an engine; `pool` has KEYS[:named]."""

    def __init__(self, channel: Any, named: int, loan_s: float) -> None:
        self.channel = channel
        self.transfer = GatedTransfer(channel, ("tcp",))
        self.region = Region.shared("kv", BLOCKS * SIZE)
        self.transfer.register(self.region)
        self.pool = BlockPool(BLOCKS)
        self.lending = Lending(channel, self.pool, "kv", GEOMETRY, loan_s)
        self.borrowing = Borrowing(channel, self.transfer, "kv", GEOMETRY)
        blocks = self.pool.allocate(named)
        for key, block in zip(KEYS, blocks, strict=False):
            self.block(block)[:] = key[:1] * SIZE
            self.pool.name(block, key)
        self.pool.release(blocks)

    def block(self, block: int) -> memoryview:
        return self.region.memory[block * SIZE : (block + 1) * SIZE]

    def lets_go(self) -> bool:
        self.pool.check_integrity()
        self.pool.check_transfer_owners(self.lending.held_blocks())
        return not self.pool.references()["transfer"]


@asynccontextmanager
async def pair(named: int = 4, loan_s: float = 30.0):
    """(lender, reader)"""
    async with channels("d", "p") as made:
        lender, reader = (Side(channel, count, loan_s) for channel, count in zip(made, (named, 0), strict=True))
        try:
            yield lender, reader
        finally:
            for side in (lender, reader):
                side.lending.close()
                await side.transfer.close()
                side.region.close()


async def test_the_leading_run_comes_as_it_lies_there_and_both_let_go():
    async with pair(4) as (lender, reader):
        here = reader.pool.allocate(len(KEYS))
        result = await reader.borrowing.get("d", KEYS, here)
        assert (result.blocks, result.nbytes) == (4, 4 * SIZE)
        assert (result.sources, result.tiers) == ({"d": 4}, {"arena": 4})
        assert result.transports == {"tcp": 4}
        for key, block in zip(KEYS[:4], here, strict=False):
            assert reader.block(block) == key[:1] * SIZE
        assert lender.lets_go() and not len(lender.lending)


async def test_windows_follow_each_other():
    async with pair(6) as (lender, reader):
        reader.borrowing._window = 2
        asked: Counter[str] = Counter()
        borrow = lender.channel._handlers[messages.BORROW]

        async def counted(peer, body, data):
            asked[peer] += 1
            return await borrow(peer, body, data)

        lender.channel.handle(messages.BORROW, counted)
        here = reader.pool.allocate(len(KEYS))
        assert (await reader.borrowing.get("d", KEYS, here)).blocks == 6
        assert asked["p"] == 3
        assert [bytes(reader.block(block)[:1]) for block in here] == [key[:1] for key in KEYS]


async def test_nothing_there_is_a_miss():
    async with pair(0) as (lender, reader):
        assert (await reader.borrowing.get("d", KEYS, reader.pool.allocate(6))).blocks == 0
        assert lender.lets_go()


async def test_blocks_are_held_while_they_are_read():
    async with pair(4) as (lender, reader):
        reader.transfer.gate.clear()
        task = asyncio.create_task(reader.borrowing.get("d", KEYS, reader.pool.allocate(6)))
        await until(lambda: reader.transfer.reading == 1)
        taken = lender.pool.allocate(lender.pool.num_free)  # all that can be had: none of the loan
        assert len(taken) == BLOCKS - 4
        for block in taken:
            lender.block(block)[:] = b"\xff" * SIZE
        reader.transfer.gate.set()
        assert (await task).blocks == 4
        lender.pool.release(taken)
        assert lender.lets_go()


async def test_what_was_read_after_the_end_of_the_loan_is_not_used():
    async with pair(4, loan_s=0.05) as (lender, reader):
        reader.transfer.gate.clear()
        task = asyncio.create_task(reader.borrowing.get("d", KEYS, reader.pool.allocate(6)))
        await until(lambda: lender.lending.expired == 1)
        assert lender.lets_go()
        reader.transfer.gate.set()
        assert (await task).blocks == 0, "the blocks may have had another content by then"


@pytest.mark.parametrize("lost", ["lender", "reader"])
async def test_a_lost_peer_in_the_middle_is_a_miss_and_holds_nothing(lost):
    async with pair(4) as (lender, reader):
        reader.transfer.gate.clear()
        task = asyncio.create_task(reader.borrowing.get("d", KEYS, reader.pool.allocate(6)))
        await until(lambda: reader.transfer.reading == 1)
        if lost == "lender":
            reader.channel.drop("d", "killed by the test")
        else:
            lender.channel.drop("p", "killed by the test")
        await until(lender.lets_go)
        reader.transfer.gate.set()
        assert (await task).blocks == 0


async def test_a_reader_that_gives_up_ends_its_loan():
    async with pair(4) as (lender, reader):
        reader.transfer.gate.clear()
        task = asyncio.create_task(reader.borrowing.get("d", KEYS, reader.pool.allocate(6)))
        await until(lambda: reader.transfer.reading == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reader.transfer.reading == 0
        await until(lambda: lender.lets_go() and not len(lender.lending))


async def test_a_part_of_the_arena_is_never_lent():
    async with channels("d", "p") as (lender, reader):
        pool = BlockPool(4)
        Lending(lender, pool, "kv", GEOMETRY)
        blocks = pool.allocate(4)
        for key, block in zip(KEYS, blocks, strict=False):
            pool.name(block, key)
        pool.release(blocks)
        body = {"loan": 1, "block_bytes": SIZE, "dtype": "float32"}
        reply, _ = await reader.call("d", messages.BORROW, body, [b"".join(KEYS)])
        assert len(reply["blocks"]) == int(MAX_LENT_SHARE * 4) and pool.num_free == 4 - len(reply["blocks"])
        reply, _ = await reader.call("d", messages.BORROW, body | {"loan": 2}, [b"".join(KEYS)])
        assert reply["blocks"] == []
        with pytest.raises(RemoteError, match="4096 bytes of float32 here, not 7"):
            await reader.call("d", messages.BORROW, body | {"loan": 3, "block_bytes": 7}, [KEYS[0]])
        with pytest.raises(RemoteError, match="of float32 here, not 4096 of int8"):
            await reader.call("d", messages.BORROW, body | {"loan": 3, "dtype": "int8"}, [KEYS[0]])
        answer, _ = await reader.call("d", messages.RETURN, {"loan": 1})
        assert answer["whole"] and pool.num_free == 4
        answer, _ = await reader.call("d", messages.RETURN, {"loan": 1})
        assert not answer["whole"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (messages.BORROW, {"loan": "x", "block_bytes": SIZE}),
        (messages.BORROW, {"loan": 1.5, "block_bytes": SIZE}),
        (messages.BORROW, {"loan": 1}),
        (messages.BORROW, {"loan": 1, "block_bytes": SIZE, "more": 1}),
        (messages.RETURN, {}),
        (messages.RETURN, {"loan": None}),
    ],
    ids=str,
)
async def test_a_message_that_is_not_as_agreed_is_refused_and_holds_nothing(kind, body):
    async with pair(4) as (lender, reader):
        with pytest.raises(RemoteError) as caught:
            await reader.channel.call("d", kind, body, [b"".join(KEYS)])
        assert caught.value.code == "bad_request"
        assert lender.lets_go() and not len(lender.lending)


@pytest.mark.parametrize(
    ("kind", "change"),
    [(messages.BORROW, {"blocks": ["0"]}), (messages.BORROW, {"region": None}), (messages.RETURN, {"whole": 1})],
    ids=str,
)
async def test_an_answer_that_is_not_as_agreed_is_a_miss(kind, change):
    async with pair(4) as (lender, reader):
        told = lender.channel._handlers[kind]

        async def lying(peer, body, data):
            return await told(peer, body, data) | change

        lender.channel.handle(kind, lying)
        assert (await reader.borrowing.get("d", KEYS, reader.pool.allocate(6))).blocks == 0
        await until(lender.lets_go)
