"""Bytes for a decode node overtake prefixes and repairs on the way out of a node, over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from cache.protocol import Deadlines
from net.channel import send_order
from net.channel.send_order import DEFER_S, KNOWN_S, LINGER_S, SendOrder
from net.channel.turns import Turns
from net.transfer.common.memory import Region
from net.transfer.engine import BULK, REPAIR, URGENT, Op, TransferEngine
from net.transfer.tcp.bulk_call import Views
from net.transfer.tcp.pushing import FRAME_BYTES, push
from tests.net.peers import channels

MIB = 1 << 20
STEP_S = 1 / 16  # more than LOOK_S
LATER, SOONER = 144 * MIB, 48 * MIB


def arrived(region: Region, nbytes: int) -> int:
    """Bytes of the first `nbytes` that are no longer zero, in steps of 64 KiB."""
    return sum(region.memory[at] != 0 for at in range((64 << 10) - 1, nbytes, 64 << 10)) * (64 << 10)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(("first", "second"), [(BULK, URGENT), (REPAIR, URGENT), (REPAIR, BULK)])
async def test_what_is_due_sooner_overtakes_what_is_under_way(op, first, second, monkeypatch):
    for name, seconds in (("DEFER_S", 60.0), ("LOOK_S", 60.0), ("LINGER_S", 0.3)):
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


class Peer:
    """A connection to it."""

    def __init__(self, peer_id: str = "other") -> None:
        self.peer_id, self.bytes = peer_id, 0

    def delivered(self) -> int:
        return self.bytes


@pytest.fixture
def order() -> SendOrder:
    return SendOrder(Clock())


def pass_on(order: SendOrder, seconds: float, rates: dict[Peer, float]) -> None:
    """Bytes arrive at these rates, and the order looks often enough."""
    for _ in range(round(seconds / STEP_S)):
        order._clock.now += STEP_S
        for peer, rate in rates.items():
            peer.bytes += round(STEP_S * rate)
        order.is_behind(REPAIR, "nobody")


def test_moving_bytes_hold_less_urgent_ones_back_and_stalled_ones_do_not(order):
    peer = Peer()
    with order.sending(URGENT, peer, large=False):
        for rank in (BULK, REPAIR, URGENT):
            assert order.is_behind(rank, "third") == (rank < URGENT), "as far as is known"
        for _ in range(3):
            pass_on(order, 0.1, {peer: 1e9})
            assert order.is_behind(BULK, "third"), "it moves"
        pass_on(order, 0.1, {peer: 0})
        assert not order.is_behind(BULK, "third") and not order.is_behind(BULK, peer.peer_id), "its peer takes nothing"
        pass_on(order, 0.1, {peer: 1e9})
        assert order.is_behind(BULK, "third"), "it moves again"
        assert not order.alone(BULK, "third") and order.alone(URGENT, "third")
    assert not order.is_behind(BULK, "third") and order.alone(BULK, "third")


def test_bytes_to_a_slow_peer_hold_back_only_those_to_the_same_peer(order):
    slow, quick = Peer("slow"), Peer("quick")
    with order.sending(BULK, quick, large=False):
        pass_on(order, 0.5, {quick: 1e9})
        with order.sending(URGENT, slow, large=False):
            assert order.is_behind(BULK, "quick"), "nobody knows yet"
            pass_on(order, 0.1, {slow: 10e6})
            for _ in range(20):
                assert not order.is_behind(BULK, "quick") and order.is_behind(BULK, "slow")
                pass_on(order, 1.0, {slow: 10e6, quick: 990e6})
        pass_on(order, KNOWN_S / 2, {quick: 1e9})
        with order.sending(URGENT, slow, large=False):
            assert not order.is_behind(BULK, "quick"), "it was slow a moment ago"
        pass_on(order, KNOWN_S * 2, {quick: 1e9})
        with order.sending(URGENT, slow, large=False):
            assert order.is_behind(BULK, "quick"), "that is long ago"


@pytest.mark.parametrize("link", [1e6, 1e9])
def test_bytes_with_an_even_share_of_the_link_hold_back_all_others(order, link):
    peers, urgent = [Peer(f"quick-{i}") for i in range(7)], Peer("urgent")
    with ExitStack() as stack:
        for peer in peers:
            stack.enter_context(order.sending(BULK, peer, large=False))
        pass_on(order, 0.5, dict.fromkeys(peers, link / 7))
        stack.enter_context(order.sending(URGENT, urgent, large=False))
        pass_on(order, 0.2, dict.fromkeys([*peers, urgent], link / 8))
        assert order.is_behind(BULK, "quick-0")
        pass_on(order, 0.2, {urgent: link})
        assert order.is_behind(BULK, "quick-0")


def test_frames_that_have_waited_long_enough_show_that_the_link_is_faster(order):
    slow, quick = Peer("slow"), Peer("quick")
    with order.sending(URGENT, slow, large=False), order.sending(BULK, quick, large=False):
        pass_on(order, DEFER_S, {slow: 10e6})
        assert order.is_behind(BULK, "quick"), "nothing was faster so far"
        quick.bytes += FRAME_BYTES
        pass_on(order, STEP_S, {slow: 10e6})
        assert not order.is_behind(BULK, "quick")


def test_the_next_piece_of_a_large_transfer_is_waited_for_briefly(order):
    with order.sending(BULK, Peer(), large=True):
        pass
    assert order.is_behind(REPAIR, "third") and not order.is_behind(BULK, "third")
    order._clock.now = 2 * LINGER_S
    assert not order.is_behind(REPAIR, "third")


class Ticking(Clock):
    """Time passes between two looks at it."""

    def __call__(self) -> float:
        self.now += DEFER_S / 5
        return self.now


class Moving(Peer):
    """Bytes to it always move."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def delivered(self) -> int:
        return round(1e9 * self._clock.now)


async def test_nothing_starves():
    order = SendOrder(clock := Ticking())
    with order.sending(URGENT, Moving(clock), large=False):
        assert await order.turn(REPAIR, "third"), "it has waited long enough"
        assert not await order.turn(URGENT, "third")
    assert not await order.turn(REPAIR, "third")


class Wire:
    """A connection that takes all bytes, `order` among others."""

    peer_id, rank, congested = "third", BULK, False

    def __init__(self, order: SendOrder) -> None:
        self.order, self.turns, self.frames = order, Turns(), []

    def delivered(self) -> int:
        return sum(self.frames)

    async def drain(self) -> None:
        pass

    def send_views(self, header, views, nbytes) -> None:
        self.frames.append(nbytes)


@pytest.mark.parametrize("encode", [None, lambda views: memoryview(bytes(sum(map(len, views)) // 2))])
async def test_every_transfer_is_faster_than_deadlines_assume_whatever_is_more_urgent(encode):
    clock = Ticking()
    wire, size = Wire(SendOrder(clock)), 32 * MIB
    with wire.order.sending(URGENT, Moving(clock), large=False):
        await push(wire, 1, Views([memoryview(bytes(size))]), None, encode=encode)
    assert sum(wire.frames) == (size if encode is None else size // 2)
    assert size / FRAME_BYTES * DEFER_S <= clock.now <= size / Deadlines().slowest_bytes_per_s


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_transfer_waits_for_its_turn_only_until_it_is_stopped(order, stopped, monkeypatch):
    for name in ("LOOK_S", "DEFER_S"):
        monkeypatch.setattr(send_order, name, 1e6)  # nothing else ends the wait
    end = asyncio.get_running_loop().create_future()
    wire, content = Wire(order), Views([memoryview(bytes(MIB))])
    with order.sending(URGENT, Peer(), large=False):
        pushing = asyncio.create_task(push(wire, 1, content, end))
        await asyncio.sleep(0)
        assert not pushing.done()
        if stopped:
            end.set_result(None)
            async with asyncio.timeout(60):
                await pushing
    async with asyncio.timeout(60):
        await pushing
    assert (wire.frames, content.left) == (([], MIB) if stopped else ([MIB], 0))
