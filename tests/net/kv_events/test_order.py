"""A publisher and a subscriber over real sockets: every batch once and in order, from before the subscription on, after
lost ones, and after the publisher was started again."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from net.kv_events.arrival import Arrival, Verdict
from net.kv_events.backlog import Backlog
from net.kv_events.publisher import EventPublisher
from net.kv_events.settings import EventSettings
from net.kv_events.subscriber import EventSubscriber
from net.kv_events.wire import BlockRemoved, encode


def test_the_backlog_keeps_the_last_batches():
    backlog = Backlog(2)
    assert [backlog.add(payload) for payload in (b"a", b"b", b"c")] == [0, 1, 2]
    assert list(backlog.since(0)) == [(1, b"b"), (2, b"c")]
    assert list(backlog.since(2)) == [(2, b"c")]
    assert list(backlog.since(9)) == []


def test_batches_that_are_added_meanwhile_do_not_change_the_numbers_of_others():
    backlog = Backlog(3)
    for payload in (b"0", b"1", b"2"):
        backlog.add(payload)
    found = backlog.since(0)
    assert next(found) == (0, b"0")
    backlog.add(b"3")
    assert next(found) == (1, b"1")
    backlog.add(b"4")
    backlog.add(b"5")
    assert list(found) == [], "2 is no longer kept"


def test_verdicts():
    arrival = Arrival(5)
    assert [arrival.judge(number, b"") for number in (5, 6, 4)] == [Verdict.APPLY, Verdict.GAP, Verdict.AGAIN]
    assert arrival.judge(4, b"", replayed=True) is Verdict.OLD
    arrival.skip_to(8)
    arrival.applied(8, b"8")
    assert (arrival.next, arrival.lost) == (9, 3)


def test_a_batch_that_was_asked_for_may_arrive_once_more():
    """It was published before the answer and after the subscription: the publisher was not started again."""
    arrival = Arrival()
    for number in (0, 1):
        arrival.applied(number, b"payload %d" % number, replayed=True)
    assert arrival.judge(1, b"payload 1") is Verdict.OLD
    assert arrival.judge(1, b"of another process") is Verdict.AGAIN
    arrival.applied(2, b"payload 2")
    assert arrival.judge(1, b"payload 1") is Verdict.AGAIN, "batches arrive in order"


def event(number: int) -> list[BlockRemoved]:
    return [BlockRemoved([number], "GPU")]


class Follower:
    """What a subscriber reports: numbers of events, and "forget"."""

    def __init__(self, endpoint: str, replay: str | None) -> None:
        self.seen: list[object] = []
        self.subscriber = EventSubscriber(endpoint, replay, self.apply, lambda: self.seen.append("forget"))
        self.subscriber.start()

    def apply(self, batch) -> None:
        self.seen += [one.block_hashes[0] for one in batch.events]

    async def sees(self, *expected: object) -> None:
        for _ in range(1000):
            if self.seen == list(expected):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"expected {expected}, got {self.seen}")


@pytest.fixture
async def opened():
    """open(tmp endpoint, ...) -> a publisher or follower, closed at the end."""
    parts: list = []
    yield parts
    for one in parts:
        await (one.subscriber.close() if isinstance(one, Follower) else one.close())


def publisher(tmp_path, parts, **more) -> EventPublisher:
    one = EventPublisher(EventSettings(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", **more))
    one.start()
    parts.append(one)
    return one


def follower(tmp_path, parts, replay=True) -> Follower:
    one = Follower(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay" if replay else None)
    parts.append(one)
    return one


async def until_heard(source: EventPublisher, first: int, one: Follower) -> int:
    """Publish until two batches in a row arrive: the first may come by the replay at the start, before the subscription
    is there. Returns the number of the next batch."""
    number, heard = first, 0
    while heard < 2:
        source.publish(0.0, event(number))
        await asyncio.sleep(0.02)
        heard = heard + 1 if one.seen[-1:] == [number] else 0
        number += 1
    return number


async def test_batches_from_before_the_subscription_are_replayed(tmp_path, opened):
    source = publisher(tmp_path, opened)
    for number in range(3):
        source.publish(0.0, event(number))
    one = follower(tmp_path, opened)
    await one.sees(0, 1, 2)
    source.publish(0.0, event(3))
    await one.sees(0, 1, 2, 3)


async def test_lost_batches_are_asked_for_again(tmp_path, opened):
    source = publisher(tmp_path, opened)
    one = follower(tmp_path, opened)
    count = await until_heard(source, 0, one)
    source._backlog.add(encode(0.0, event(count)))  # as if it were lost on its way
    source.publish(0.0, event(count + 1))
    await one.sees(*range(count + 2))
    assert one.subscriber.lost == 0


async def test_what_nobody_keeps_is_lost_and_all_is_forgotten(tmp_path, opened):
    source = publisher(tmp_path, opened, buffer_steps=1)
    for number in range(4):
        source.publish(0.0, event(number))
    one = follower(tmp_path, opened)
    await one.sees("forget", 3)
    assert one.subscriber.lost == 3


async def test_a_publisher_that_begins_again_holds_nothing(tmp_path, opened):
    first = publisher(tmp_path, opened)
    for number in range(1000):
        first.publish(0.0, event(number))
    one = follower(tmp_path, opened)
    await one.sees(*range(1000))
    await first.close()
    one.seen.clear()
    second = publisher(tmp_path, opened)
    while not one.seen:
        second.publish(0.0, event(100))
        await asyncio.sleep(0.02)
    await one.sees("forget", *[100] * second.published)


async def test_without_replay_a_subscriber_begins_where_it_can(tmp_path, opened):
    source = publisher(tmp_path, opened)
    for number in range(3):
        source.publish(0.0, event(number))
    one = follower(tmp_path, opened, replay=False)
    await until_heard(source, 3, one)
    assert one.seen[0] == "forget" and one.seen[1] >= 3


@pytest.mark.expects_error(always=False)
async def test_bytes_that_are_no_events_do_not_end_it(tmp_path, opened):
    source = publisher(tmp_path, opened)
    source._backlog.add(b"\xc1")
    source.publish(0.0, event(1))
    one = follower(tmp_path, opened)
    await one.sees("forget", 1)


def test_an_endpoint_in_use_is_an_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        EventPublisher(EventSettings("tcp://nowhere.invalid:x:*"))


async def asks(context: zmq.asyncio.Context, endpoint: str, room: int) -> zmq.asyncio.Socket:
    """A subscriber that asks for all batches, with a queue for `room` messages."""
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(room)
    socket.connect(endpoint)
    await socket.send_multipart((b"", bytes(8)))
    return socket


async def answer(socket: zmq.asyncio.Socket) -> list[int]:
    """Numbers of the batches, and -1."""
    numbers: list[int] = []
    async with asyncio.timeout(60):
        while numbers[-1:] != [-1]:
            numbers.append(int.from_bytes((await socket.recv_multipart())[-2], "big", signed=True))
    return numbers


async def test_a_long_answer_loses_nothing_and_holds_up_nobody(tmp_path, opened):
    """Neither the node nor another subscriber waits for one that does not read. ZeroMQ dropped what its queue of 1000
    messages did not take, and the end too."""
    source, most = publisher(tmp_path, opened), 2000
    for _ in range(most):
        source.publish(1.0, [BlockRemoved([bytes(8000)], "GPU")])
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    with zmq.asyncio.Context() as context:
        slow, fast = [await asks(context, source.replay_endpoint, room) for room in (100, 2 * most)]
        try:
            assert await answer(fast) == [*range(most), -1]
            counting.cancel()
            assert turns > most
            assert await answer(slow) == [*range(most), -1]
        finally:
            counting.cancel()
            for one in (slow, fast):
                one.close(linger=0)
