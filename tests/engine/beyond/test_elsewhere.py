"""Blocks on other nodes: parts from another process equal the whole, and every end of a lease frees its blocks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from attention.parts import Parts, attend_part
from cache.arena import checksum
from engine.beyond import elsewhere as asking_side
from engine.beyond import held as asked_blocks
from engine.beyond import messages
from engine.beyond.elsewhere import Elsewhere, NoRoomElsewhere
from engine.beyond.held import HeldBlocks
from engine.beyond.lodged import Done, RequestRoom
from engine.step.cold import Cold, PartLate, PartLost
from net.channel.channel import Channel
from net.errors import RemoteError
from sched.beyond import ColdSteps
from sched.elsewhere import Job, Own, soon_s
from sched.membership.member import Member
from tests.engine.beyond.holders import (
    BLOCK_SIZE,
    GEOMETRY,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    asking,
    holding,
)
from tests.engine.beyond.test_same_tokens import Disk, Slots, memory_of, tokens_of
from tests.engine.tiny_llama import runner, tiny
from tests.net.peers import channels, child, until

NOTHING = Own(0, 0, 1e-3, 1e-3)
SCALE = HEAD_SIZE**-0.5


def job(need: int) -> Job:
    return Job(need, 100, 10, 64, LAYERS, GEOMETRY.block_bytes, 100)


def key_of(i: int) -> bytes:
    return i.to_bytes(16, "big")


def kv_blocks(count: int, seed: int = 1) -> torch.Tensor:
    """[count, layers, 2, kv heads, block size, head size]"""
    return torch.randn(count, *GEOMETRY.shape, generator=torch.Generator().manual_seed(seed))


def store(held: HeldBlocks, blocks: torch.Tensor, first: int = 0) -> None:
    for i, block in enumerate(blocks, first):
        memory = block.numpy().view(np.uint8).reshape(-1).data
        held.store(i, memory, checksum(memory), key_of(i))


def ask(held: HeldBlocks, layer: int, q: torch.Tensor, count: int, soft_cap: float = 0.0) -> list:
    return list(held.ask(layer, q, count, SCALE, soft_cap)())


def whole(q: torch.Tensor, blocks: torch.Tensor, layer: int, soft_cap: float = 0.0) -> tuple:
    k, v = blocks[:, layer].transpose(0, 1).transpose(1, 2).flatten(2, 3)
    return attend_part(q, k, v, SCALE, soft_cap)


@asynccontextmanager
async def process(slots: int = 40) -> AsyncIterator[tuple[Elsewhere, int]]:
    """(the asking side of a holder in another process, its pid)"""
    async with child("../engine/beyond/holders.py", str(slots)) as other:
        port = int(await other.stdout.readline())
        channel = Channel("owner", {})
        await channel.start("127.0.0.1")
        channel.introduce("holder", ("127.0.0.1", port))
        ours = asking(channel, "holder")
        try:
            yield ours, other.pid
        finally:
            ours.close()
            await channel.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Whatever else this machine does, nobody counts as late."""
    monkeypatch.setattr(asked_blocks, "soon_s", lambda *_: 60.0)


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("rows", [1, 5, 70])
async def test_parts_from_another_process_equal_the_whole(monkeypatch, rows, soft_cap):
    monkeypatch.setattr(asked_blocks, "MOST_BYTES", 32 * HEADS * (HEAD_SIZE + 1) * 4)  # 70 rows are three messages
    blocks, q = kv_blocks(12), torch.randn(rows, HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(2))
    async with process() as (ours, _):
        split, held = await ours.lodge(job(12), NOTHING, (), named=False)
        assert split.held == (("holder", 12),) and held.known == 0
        for layer in range(LAYERS):
            count = (3, 7, 12)[layer]
            done = (0, 3, 7)[layer]
            await asyncio.to_thread(store, held, blocks[done:count], done)
            ((out, lse),) = await asyncio.to_thread(ask, held, layer, q, count, soft_cap)
            right, right_lse = whole(q, blocks[:count], layer, soft_cap)
            torch.testing.assert_close(out, right, atol=2e-6, rtol=2e-6)
            torch.testing.assert_close(lse, right_lse, atol=2e-6, rtol=2e-6)
            mine = kv_blocks(2, seed=3)
            parts = Parts()
            parts.add((out, lse))
            parts.add(whole(q, mine, layer, soft_cap))
            both = whole(q, torch.cat([blocks[:count], mine]), layer, soft_cap)[0]
            torch.testing.assert_close(parts.merged(), both, atol=2e-6, rtol=2e-6)
        asks = LAYERS * -(-rows // 32) if rows > 1 else LAYERS
        assert ours.done.asks == asks and ours.done.stored == 12
        assert ours.done.query_bytes == LAYERS * rows * HEADS * HEAD_SIZE * 4
        assert ours.done.part_bytes == LAYERS * rows * HEADS * (HEAD_SIZE + 1) * 4


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
async def test_a_model_over_blocks_of_another_process_gives_equal_tokens(monkeypatch, backend, late):
    """DRAM, another process and SSD, in this order. late: so is every answer."""
    from attention.choice.choose import made

    try:
        made(backend)
    except ValueError as error:
        pytest.skip(str(error))
    theirs = tiny(bias=True)  # 6 heads of 32, 2 of K and V, 3 layers
    prompt = [3 + i * 7 % 200 for i in range(400)]
    right = tokens_of(runner(theirs, backend, num_blocks=32), None, 64, prompt)
    small = runner(theirs, backend, num_blocks=8)
    reader, memory = memory_of(small, 40)
    async with process() as (ours, _):
        _, held = await ours.lodge(job(9), NOTHING, (), named=True)
        room = RequestRoom(Slots(), Disk(), memory, ColdSteps(), Done(), held)
        try:
            cold = Cold(3, 1, BLOCK_SIZE, LAYERS)
            cold.lodge(room, (), [*range(6), *range(-1, -10, -1), *range(40, 80)])
            if late:
                monkeypatch.setattr(asked_blocks, "soon_s", lambda *_: 0.0)
            cold.keys = [key_of(place) for place in range(100)]
            cold.seat(range(4))
            assert await asyncio.to_thread(tokens_of, small, cold, cold.chunk_tokens, prompt) == right
            assert ours.done.stored == 9 and ours.done.asks > 12 * LAYERS
            assert (ours.done.late > 12) == late

            again = Cold(3, 1, BLOCK_SIZE, LAYERS)  # most of the prompt is there already
            del room._far[5:]
            again.lodge(room, cold.slots[:20], range(45, 80))
            again.keys = cold.keys
            again.seat(range(4))
            assert await asyncio.to_thread(tokens_of, small, again, 17, prompt, 20 * BLOCK_SIZE) == right
        finally:
            room.close()
            reader.close()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_holder_that_dies_or_hangs_is_lost_within_the_deadline(monkeypatch, by):
    monkeypatch.setattr(asked_blocks, "deadline_s", lambda *_: 0.5)
    monkeypatch.setattr(asking_side, "OFFER_S", 0.5)
    q = torch.randn(1, HEADS, HEAD_SIZE)
    async with process() as (ours, pid):
        _, held = await ours.lodge(job(4), NOTHING, (), named=False)
        await asyncio.to_thread(store, held, kv_blocks(4))
        assert len(await asyncio.to_thread(ask, held, 0, q, 4)) == 1
        os.kill(pid, by)
        try:
            with pytest.raises(PartLost, match="holder does not answer for 4 blocks"):
                await asyncio.to_thread(ask, held, 1, q, 4)
            with pytest.raises(PartLost):
                await asyncio.to_thread(ask, held, 2, q, 4)
            assert ours.done.fallbacks == 1, "one request"
            held.close()
            with pytest.raises(NoRoomElsewhere) as error:
                await ours.lodge(job(4), NOTHING, (), named=False)
            assert error.value.lent == 0
        finally:
            if by is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)


async def test_a_late_answer_is_kept_for_the_same_queries(monkeypatch):
    """The engine thread does not wait for it, and nothing is asked twice. Other queries are asked as always."""
    q = torch.randn(1, HEADS, HEAD_SIZE)
    right, blocks = q.clone(), kv_blocks(4)
    async with process() as (ours, pid):
        _, held = await ours.lodge(job(4), NOTHING, (), named=False)
        await asyncio.to_thread(store, held, blocks)
        await asyncio.to_thread(ask, held, 0, q, 4)
        monkeypatch.setattr(asked_blocks, "soon_s", soon_s)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(PartLate) as late:
                await asyncio.to_thread(ask, held, 1, q, 4)
            q.zero_()  # the model goes on
            with pytest.raises(PartLate):
                await asyncio.to_thread(ask, held, 1, right, 4)
            assert late.value.layer == 1 and ours.done.asks == 1 and ours.done.late == 2
            answered, loop = asyncio.Event(), asyncio.get_running_loop()
            late.value.then(lambda: loop.call_soon_threadsafe(answered.set))
            assert not answered.is_set()
        finally:
            os.kill(pid, signal.SIGCONT)
        await answered.wait()
        ((out, _),) = await asyncio.to_thread(ask, held, 1, right, 4)
        torch.testing.assert_close(out, whole(right, blocks, 1)[0], atol=2e-6, rtol=2e-6)
        assert ours.done.asks == 2 and ours.done.fallbacks == 0
        held.close()
        with pytest.raises(PartLost, match="has ended"):
            held.ask(1, right, 4, SCALE, 0.0)
        assert ours.done.fallbacks == 0


@asynccontextmanager
async def neighbours(slots: int = 40):
    """A holder and an asking side in one process."""
    async with channels("owner", "holder") as (mine, theirs), holding(theirs, slots) as (holder, share, downs):
        ours = asking(mine, "holder")
        try:
            yield ours, holder, share, downs
        finally:
            ours.close()


def held_in(share) -> int:
    return int(share.stats()["dram"]["held"])


async def test_every_end_of_a_lease_frees_its_blocks():
    async with neighbours() as (ours, holder, share, downs):
        assert held_in(share) == 0, "the measurement has ended"
        for end in ("release", "owner lost", "time"):
            _, held = await ours.lodge(job(10), NOTHING, (), named=False)
            assert held_in(share) == 10 and holder.leases.lent == 10 and holder.leases.left == 20
            if end == "release":
                held.close()
            elif end == "owner lost":
                downs[0](Member("another", ("", 0)), "dead")
                assert held_in(share) == 10
                downs[0](Member("owner", ("", 0)), "dead")
            else:
                holder._free(holder.leases.expire(1e12))
            await until(lambda: held_in(share) == 0)
            with pytest.raises(PartLost, match="has ended" if end == "release" else "owner has no lease"):
                await asyncio.to_thread(ask, held, 0, torch.zeros(1, HEADS, HEAD_SIZE), 1)
            held.close()


async def test_what_is_stored_is_found_and_what_is_found_is_not_sent_again():
    async with neighbours() as (ours, _, share, _):
        blocks, keys = kv_blocks(6), [key_of(i) for i in range(6)]
        _, held = await ours.lodge(job(6), NOTHING, keys, named=True)
        await asyncio.to_thread(store, held, blocks[:4])
        q = torch.randn(1, HEADS, HEAD_SIZE)
        await asyncio.to_thread(ask, held, 0, q, 4)
        held.close()
        await until(lambda: held_in(share) == 0)
        assert share.count_leading(keys) == 4
        _, again = await ours.lodge(job(6), NOTHING, keys, named=True)
        assert again.known == 4 and held_in(share) == 6
        await asyncio.to_thread(store, again, blocks)
        ((out, _),) = await asyncio.to_thread(ask, again, 2, q, 6)
        torch.testing.assert_close(out, whole(q, blocks, 2)[0], atol=2e-6, rtol=2e-6)
        assert ours.done.stored == 6, "four, and then the two that were missing"


async def test_a_full_holder_refuses_with_the_arithmetic():
    async with neighbours(slots=40) as (ours, holder, share, _):
        lodging = await share.lodge((), 25)  # this node's own request beyond memory
        with pytest.raises(NoRoomElsewhere):
            await ours.lodge(job(20), NOTHING, (), named=False)
        assert len(holder.leases) == 0 and held_in(share) == 25
        with pytest.raises(asking_side.Refused, match="5 of 20 blocks have no slot"):
            await ours._lease(ours.divide(job(20), NOTHING, await ours.holders()), (), False)
        lodging.close()
        split, held = await ours.lodge(job(20), NOTHING, (), named=False)
        assert split.num_held == 20
        with pytest.raises(NoRoomElsewhere) as error:
            await ours.lodge(job(11), NOTHING, (), named=False)
        assert error.value.lent == 10
        held.close()


async def test_a_holder_that_is_slow_to_lend_costs_no_lease_of_another_one(monkeypatch):
    """The second one lends only when the first has heard that its lease is needed further on."""
    monkeypatch.setattr(asking_side, "LEASE_S", 0.03)
    numbers, kept = dict[str, int](), asyncio.Event()

    class Peers:
        node_id = "owner"

        async def call(self, node, kind, body, data=(), timeout_s=0.0):
            if kind == messages.OFFER:
                return {"blocks": 4, "bytes_per_s": 1e9}, memoryview(b"")
            numbers[node] = body["lease"]
            if len(numbers) == 2:
                async with asyncio.timeout(timeout_s):
                    await kept.wait()
            return {"found": 0}, memoryview(b"")

        def post(self, node, kind, body):
            if kind == messages.KEEP and len(numbers) == 2 and body["leases"] == [numbers[node]]:
                kept.set()

        def on_lost(self, callback):
            pass

    ours = asking(Peers(), "one", "two")
    split, held = await ours.lodge(job(8), NOTHING, (), named=False)
    assert split.num_held == 8 and len(numbers) == 2
    held.close()
    ours.close()


async def test_no_room_is_lent_for_less_than_a_block():
    async with neighbours() as (ours, holder, _, _):
        for blocks in (0, -5):
            with pytest.raises(RemoteError, match=f"{blocks} blocks are no room"):
                body = {"lease": 1, "blocks": blocks}
                await ours.channel.call("holder", messages.LEND, body, [key_of(1)])
        assert holder.leases.left == holder.leases.most


async def test_a_block_that_arrives_damaged_or_out_of_turn_is_not_computed_with():
    async with neighbours() as (ours, _, _, _):
        q, (block,) = torch.zeros(1, HEADS, HEAD_SIZE), kv_blocks(1)
        memory = block.numpy().view(np.uint8).reshape(-1).data
        for number, found, reason in (
            (0, checksum(memory) ^ 1, "damaged"),
            (1, checksum(memory), "block 1 comes where"),
        ):
            _, held = await ours.lodge(job(4), NOTHING, (), named=False)
            held.store(number, memory, found, b"")
            with pytest.raises(PartLost, match=reason):
                await asyncio.to_thread(ask, held, 0, q, 1)
            held.close()
        _, held = await ours.lodge(job(4), NOTHING, (), named=False)
        with pytest.raises(PartLost, match="layer 0 of 2 blocks is not here"):
            await asyncio.to_thread(ask, held, 0, q, 2)
        held.close()


async def test_a_computation_that_outlives_its_lease_frees_the_blocks_at_its_end(monkeypatch):
    async with neighbours() as (ours, holder, share, _):
        _, held = await ours.lodge(job(4), NOTHING, (), named=False)
        await asyncio.to_thread(store, held, kv_blocks(4))
        gate = asyncio.Event()
        right, loop = holder._attend, asyncio.get_running_loop()

        def slow(*arguments):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return right(*arguments)

        monkeypatch.setattr(holder, "_attend", slow)
        asked = loop.run_in_executor(None, ask, held, 0, torch.zeros(1, HEADS, HEAD_SIZE), 4)
        await until(lambda: any(lease.using for lease in holder._held))
        held.close()
        await until(lambda: len(holder.leases) == 0)
        assert held_in(share) == 4
        gate.set()
        assert len(await asked) == 1
        await until(lambda: held_in(share) == 0)
