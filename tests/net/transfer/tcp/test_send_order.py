"""Bytes for a decode node overtake prefixes and repairs on the way out of a node, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from cache.protocol import Deadlines
from net.channel import send_order
from net.channel.send_order import DEFER_S, LINGER_S, STALL_S, SendOrder
from net.channel.turns import Turns
from net.transfer.common.memory import Region
from net.transfer.engine import BULK, REPAIR, URGENT, Op, TransferEngine
from net.transfer.tcp.bulk_call import Views
from net.transfer.tcp.pushing import FRAME_BYTES, push
from tests.net.peers import channels

MIB = 1 << 20
LATER, SOONER = 144 * MIB, 48 * MIB


def arrived(region: Region, nbytes: int) -> int:
    """Bytes of the first `nbytes` that are no longer zero, in steps of 64 KiB."""
    return sum(region.memory[at] != 0 for at in range((64 << 10) - 1, nbytes, 64 << 10)) * (64 << 10)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(("first", "second"), [(BULK, URGENT), (REPAIR, URGENT), (REPAIR, BULK)])
async def test_what_is_due_sooner_overtakes_what_is_under_way(op, first, second, monkeypatch):
    for name, seconds in (("DEFER_S", 60.0), ("STALL_S", 60.0), ("LINGER_S", 0.3)):
        monkeypatch.setattr(send_order, name, seconds)  # a busy machine stops this process for longer than the usual
    async with channels("sender", "receiver") as made:
        sender, receiver = (TransferEngine(channel, ("tcp",)) for channel in made)
        size = LATER + SOONER
        with Region.shared("full", size) as full, Region.shared("empty", size) as empty:
            full.memory[:] = b"\1" * size
            sender.register(full)
            receiver.register(empty)

            def move(start: int, nbytes: int, priority: int):
                if op is Op.WRITE:
                    engine, names = sender, ("receiver", op, "full", "empty")
                else:
                    engine, names = receiver, ("sender", op, "empty", "full")
                return engine.submit(*names, [(start, start, nbytes)], 60.0, priority)

            await move(LATER, 1, second)  # connections are open
            later = asyncio.create_task(move(0, LATER, first))
            for _ in range(100_000):
                await asyncio.sleep(0)
                if arrived(empty, LATER) >= 16 * MIB:
                    break
            before = arrived(empty, LATER)
            await move(LATER, SOONER, second)
            between = arrived(empty, LATER) - before
            assert not later.done(), "else this shows nothing"
            print(f"{between / MIB:.0f} MiB of the first while {SOONER / MIB:.0f} MiB of the second moved")
            assert between < SOONER / 2, "shared evenly, as much of the first would have moved"
            await later
            assert empty.memory[:] == full.memory[:]
            for engine in (sender, receiver):
                await engine.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_moving_bytes_hold_less_urgent_ones_back_and_stalled_ones_do_not():
    clock, passed = Clock(), [0]
    order = SendOrder(clock)
    with order.sending(URGENT, lambda: passed[0], large=False):
        assert order.is_behind(BULK) and order.is_behind(REPAIR) and not order.is_behind(URGENT)
        for _ in range(3):
            clock.now, passed[0] = clock.now + 2 * STALL_S, passed[0] + 1
            assert order.is_behind(BULK), "it moves"
        clock.now += 2 * STALL_S
        assert not order.is_behind(BULK), "its peer takes nothing"
        passed[0] += 1
        clock.now += 2 * STALL_S
        assert order.is_behind(BULK), "it moves again"
        assert not order.alone(BULK) and order.alone(URGENT)
    assert not order.is_behind(BULK) and order.alone(BULK)


def test_the_next_piece_of_a_large_transfer_is_waited_for_briefly():
    clock = Clock()
    order = SendOrder(clock)
    with order.sending(BULK, lambda: 0, large=True):
        pass
    assert order.is_behind(REPAIR) and not order.is_behind(BULK)
    clock.now = 2 * LINGER_S
    assert not order.is_behind(REPAIR)


async def test_nothing_starves():
    clock = Clock()
    order = SendOrder(clock)

    def passed() -> int:
        clock.now += DEFER_S / 4
        return round(1e6 * clock.now)

    with order.sending(URGENT, passed, large=False):
        assert await order.turn(REPAIR), "it has waited long enough"
        assert not await order.turn(URGENT)
    assert not await order.turn(REPAIR)


class Ticking(Clock):
    """Time passes between two looks at it."""

    def __call__(self) -> float:
        self.now += DEFER_S / 5
        return self.now


class Wire:
    """A connection that takes all bytes, `order` among others."""

    rank, congested = BULK, False

    def __init__(self, order: SendOrder) -> None:
        self.order, self.turns, self.frames = order, Turns(), []

    def passed(self) -> int:
        return sum(self.frames)

    async def drain(self) -> None:
        pass

    def send_views(self, header, views, nbytes) -> None:
        self.frames.append(nbytes)


@pytest.mark.parametrize("encode", [None, lambda views: memoryview(bytes(sum(map(len, views)) // 2))])
async def test_every_transfer_is_faster_than_deadlines_assume_whatever_is_more_urgent(encode):
    clock = Ticking()
    wire, size = Wire(SendOrder(clock)), 32 * MIB
    with wire.order.sending(URGENT, lambda: round(1e9 * clock.now), large=False):  # more urgent bytes always move
        await push(wire, 1, Views([memoryview(bytes(size))]), None, encode=encode)
    assert sum(wire.frames) == (size if encode is None else size // 2)
    assert size / FRAME_BYTES * DEFER_S <= clock.now <= size / Deadlines().slowest_bytes_per_s


async def test_what_is_stopped_does_not_wait_for_its_turn():
    order, end = SendOrder(Clock()), asyncio.get_running_loop().create_future()  # it would wait forever
    wire, content = Wire(order), Views([memoryview(bytes(MIB))])
    with order.sending(URGENT, lambda: 0, large=False):
        pushing = asyncio.create_task(push(wire, 1, content, end))
        await asyncio.sleep(0)
        assert not pushing.done()
        end.set_result(None)
        async with asyncio.timeout(60):
            await pushing
    assert wire.frames == [] and content.left == MIB
