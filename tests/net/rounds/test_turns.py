"""Turns of threads, and a desk in memory that two processes of one host share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from net.channel.wire import FrameError
from net.errors import PeerLost
from net.rounds import near_outpost
from net.rounds.desk import Desk, await_answers, new_bell, new_region
from net.rounds.door import Door, parsed, spelled
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.rounds.near import Handover, reach, take
from net.rounds.near_desk import NearDesk
from net.rounds.near_outpost import NearOutpost
from net.rounds.outpost import addresses
from net.rounds.turns import MOST_TURN_S, Turns
from net.transfer.common.memory import Region
from tests.net.rounds.test_remote_desk import connected, until

LAYOUT = Layout(most_rows=8, hidden=16, top_k=2, dtype="float32")


def test_threads_work_one_at_a_time_in_fair_order():
    """The first holds its turn until all others wait; the one with little work passes the one with much."""
    turns, order, holds = Turns(), list[str](), threading.Event()

    def work(who: str, amount: float) -> None:
        with turns.turn(who, amount, lambda waits: None):
            if who == "large":
                holds.wait(60)
            order.append(who)

    threads = [threading.Thread(target=work, args=("large", 100.0))]
    threads[0].start()
    until(lambda: turns._holder == "large")
    for who, amount in (("large again", 100.0), ("small", 1.0), ("medium", 10.0)):
        threads.append(threading.Thread(target=work, args=(who, amount)))
        threads[-1].start()
        until(lambda who=who: who in turns._granted)
    turns._queue._ends["large again"] = turns._queue._waiting["large again"] = 100.0  # as if of the same process
    holds.set()
    for thread in threads:
        thread.join()
    assert order == ["large", "small", "medium", "large again"]


def test_who_waits_says_so_until_the_turn_before_takes_too_long():
    clock, said = SimpleNamespace(now=0.0), list[bool]()
    turns, done = Turns(lambda: clock.now), threading.Event()

    def work() -> None:
        with turns.turn("b", 1, said.append):
            done.set()

    with turns.turn("a", 1, said.append):
        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: said == [True])
        clock.now = MOST_TURN_S + 1
        until(lambda: said == [True, False])
        assert not done.is_set()
    thread.join()
    assert done.is_set() and said == [True, False]


def test_a_debt_ends_when_all_work_is_done():
    """One of them had much work while the others had none."""
    turns = Turns()
    for who, work in (("b", 1), ("a", 10_000)):
        with turns.turn(who, work, lambda waits: None):
            pass
    order = list[str]()
    for who in "abc":
        turns._queue.ask(who, 10)
    while turns._queue:
        order.append(turns._queue.next())
        if len(order) <= 3:
            turns._queue.ask(order[-1], 10)
    assert sorted(order[:3]) == sorted(order[3:]) == ["a", "b", "c"]


def test_a_turn_ends_with_an_error_too():
    turns = Turns()
    with pytest.raises(RuntimeError), turns.turn("a", 1, lambda waits: None):
        raise RuntimeError
    with turns.turn("b", 1, lambda waits: pytest.fail("nobody is before it")):
        pass


class Near:
    """A near desk with its other end, both in this process."""

    def __init__(self, folder: Path) -> None:
        near, far = connected(None, None)
        assert isinstance(near, FrameSocket) and isinstance(far, FrameSocket)
        self.bell, self.ended, self.told = new_bell("bell"), list[str](), list[list[str]]()
        region = new_region("desk", LAYOUT)
        with closing(Handover(folder)) as handover:
            sock = reach(handover.path)
            assert sock is not None
            handover.give([region.memfd or 0, self.bell.memfd or 0])
            with sock:
                descriptors = take(sock, 2)
        assert reach(handover.path) is None
        self.outpost = NearOutpost(far, LAYOUT, descriptors, self.told.append).__enter__()
        self.desk = NearDesk(region, near, LAYOUT, self.ended.append)

    def close(self) -> None:
        self.desk.close()
        self.outpost.__exit__()
        self.bell.close()


@pytest.fixture
def near(tmp_path: Path) -> Iterator[Near]:
    with closing(Near(tmp_path)) as made:
        yield made


def test_a_message_and_its_answer_through_memory(near):
    near.desk.region.memory[PAGE : PAGE + 4] = b"rows"
    near.desk.ask(0, 3, 1, 2)
    message = near.outpost.desk.next_message(30)
    assert message is not None and message.head[:4] == [0, 3, 1, 2]
    assert bytes(near.outpost.desk.region.memory[PAGE : PAGE + 4]) == b"rows"
    near.outpost.queue(True)
    assert near.desk.queued and not near.desk.idle
    near.outpost.queue(False)
    near.outpost.answered(message)
    assert await_answers([near.desk], near.bell, 30) == [True] and not near.desk.queued
    before = near.desk.beats
    until(lambda: near.desk.beats > before + 2)


def test_the_nodes_are_told_and_each_end_sees_the_end_of_the_other(near):
    near.desk.tell(["a:1", "b:2"])
    until(lambda: near.told == [["a:1", "b:2"]])
    near.outpost._wire.end()
    until(lambda: bool(near.ended) and near.outpost.ended is not None)  # each end's thread sees it on its own


def test_a_side_that_sends_nonsense_has_ended(near):
    near.outpost._wire.send({"m": 1})
    until(lambda: bool(near.ended))
    assert "something else than messages" in near.ended[0]


@pytest.mark.parametrize("nodes", ["a:1", [1], None, ["a:1", "nowhere"], ["a..b:1"]])
def test_names_of_nodes_are_addresses(nodes):
    with pytest.raises(FrameError, match="names no nodes"):
        addresses({"nodes": nodes})


def refused(region: Region, words: str) -> None:
    """The outpost does not take this memory, for a reason with these words, and keeps no descriptor of it."""
    near, far = connected(None, None)
    assert isinstance(near, FrameSocket) and isinstance(far, FrameSocket)
    with region, new_bell("bell") as bell:
        copies = [os.dup(region.memfd or 0), os.dup(bell.memfd or 0)]
        with pytest.raises(PeerLost, match=words):
            NearOutpost(far, LAYOUT, copies, lambda nodes: None)
        for copy in copies:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(copy)
    near.close()
    far.close()


def test_memory_of_another_layout_is_refused():
    refused(Region.shared("small", PAGE), "cannot be used")


def test_memory_is_given_back_if_no_beats_can_be_sent(monkeypatch):
    def no_thread(desk: Desk) -> None:
        raise OSError("no thread")

    monkeypatch.setattr(near_outpost, "Heart", no_thread)
    refused(new_region("desk", LAYOUT), "no thread")


def test_a_remote_message_that_waits_is_known_until_its_answer(tmp_path):
    """Over TCP, the same word is set by a frame."""
    from net.rounds.outpost import Outpost
    from net.rounds.remote_desk import RemoteDesk

    near, far = connected(None, None)
    assert isinstance(near, FrameSocket) and isinstance(far, FrameSocket)
    told, bell = list[list[str]](), new_bell("bell")
    outpost = Outpost(far, LAYOUT, told=told.append).__enter__()
    desk = RemoteDesk(near, LAYOUT, bell, lambda why: None)
    try:
        desk.tell(["a:1"])
        desk.ask(0, 0, 1, 1)
        message = outpost.desk.next_message(30)
        assert message is not None and told == [["a:1"]]
        outpost.queue(True)
        until(lambda: desk.queued)
        outpost.answered(message)
        assert await_answers([desk], bell, 30) == [True] and not desk.queued
    finally:
        desk.close()
        outpost.__exit__()
        bell.close()


def test_a_door_tells_who_else_shares_the_ranks():
    door = Door("127.0.0.1", 0)
    assert door.nodes == (door.where,) and not door.changed.is_set()
    door.share([])
    assert not door.changed.is_set()
    door.share(["127.0.0.1:9"])
    assert door.changed.is_set() and set(door.nodes) == {door.where, "127.0.0.1:9"}
    folder = door.folder
    assert folder.is_dir() and folder == door.folder
    door.close()
    door.close()
    assert not folder.exists()


@pytest.mark.parametrize("where", ["127.0.0.1:9", "[::1]:9100"])
def test_addresses_are_read_as_they_are_spelled(where):
    assert spelled(parsed(where)) == where


@pytest.mark.parametrize("where", ["host", ":1", "host:", "host:0", "host:65536", "host:x", "host:999999", "a..b:1"])
def test_what_is_no_address(where):
    with pytest.raises(ValueError, match=r"HOST:PORT|label empty"):
        parsed(where)


def test_a_desk_waits_for_nobody_at_first():
    with new_region("desk", LAYOUT) as region:
        assert not Desk(region, LAYOUT).queued
