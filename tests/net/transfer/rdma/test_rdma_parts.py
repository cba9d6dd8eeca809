"""What RDMA decides without verbs: addresses, read depths, shares of completion queues, memory pinned in threads, and
what a link knows of the peer's regions."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.channel.wire import Frame
from net.errors import PeerLost, TransferError
from net.transfer.common.memory import Region
from net.transfer.common.topology import Topology
from net.transfer.common.transport import Op, Unusable
from net.transfer.rdma.completion_shares import CompletionShares
from net.transfer.rdma.device import registered
from net.transfer.rdma.endpoint import Endpoint
from net.transfer.rdma.gids import Gid, choose
from net.transfer.rdma.link import Link
from net.transfer.rdma.registrations import INLINE_MAX, Registered, Registrations

V4 = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
V6 = bytes(range(16))


def test_the_address_is_one_of_the_port_in_use():
    """Every port of a card has a table of its own, and all tables come in one answer."""
    table = [Gid(0, 2, V4, True), Gid(0, 1, V6, False), Gid(1, 1, V6, True), Gid(3, 1, V4, True), Gid(4, 1, V4, False)]
    assert choose(table, port=1) == Gid(3, 1, V4, True), "routable, by IPv4"
    assert choose(table, port=2) == Gid(0, 2, V4, True)
    assert choose(table, port=1, index=0) == Gid(0, 1, V6, False)
    assert choose(table, port=2, index=0) == Gid(0, 2, V4, True)
    with pytest.raises(ValueError, match=r"a GID of index 3 \(--rdma-gid-index\) on port 2"):
        choose(table, port=2, index=3)
    with pytest.raises(ValueError, match="on port 3: is its network interface up"):
        choose(table, port=3)


def endpoint(**depths):
    return Endpoint(1, 2, "00" * 16, 0, 5, **depths)


def test_as_many_reads_are_under_way_as_the_other_side_answers():
    """A card that begins 16 but answers 4 (max_qp_init_rd_atom 16, max_qp_rd_atom 4) and one that begins 2."""
    one, other = endpoint(reads=16, answers=4), endpoint(reads=2, answers=8)
    assert one.depths(other) == (8, 2)
    assert other.depths(one) == (2, 8)
    assert Endpoint.from_json(one.to_json()) == one
    with pytest.raises(ValueError, match="not an RDMA endpoint"):
        Endpoint.from_json({**one.to_json(), "answers": None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("qp_num", value) for value in (1 << 24, -1, True, 1.0, "1", float("inf"))),
        *(("psn", 1 << 24), ("lid", 1 << 16), ("mtu", 0), ("mtu", 6), ("reads", 256), ("answers", -1)),
        *(("gid", value) for value in ("", "00" * 15, "0g" * 16, 7, None)),
    ],
)
def test_what_the_verbs_cannot_take_is_no_endpoint(name, value):
    """Integers beyond the sizes of the fields raised OverflowError, which ended the connection's task."""
    with pytest.raises(ValueError):
        Endpoint.from_json({**endpoint(reads=1, answers=1).to_json(), name: value})


@given(st.integers(1, 50), st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=60))
def test_no_completion_queue_is_promised_more_than_it_holds(entries, most, steps):
    shares, held = CompletionShares(entries, most), []
    for gives_back, count in steps:
        if gives_back and held:
            shares.give_back(*held.pop(count % len(held)))
            continue
        used = [sum(n for queue, n in held if queue == number) for number in range(most)]
        room = max(entries - one for one in used)
        try:
            held.append((shares.take(count), count))
        except ValueError:
            assert count > room, "refused only where there is no room"
        assert all(sum(n for queue, n in held if queue == number) <= entries for number, _ in held)
        assert all(number < most for number, _ in held)


class Card:
    """Pins when the test says so."""

    def __init__(self):
        self.pins, self.pinned = 0, set()
        self.may = threading.Event()
        self.memory = Registrations(self._pin, self.pinned.remove)

    def _pin(self, region):
        assert self.may.wait(20)
        self.pins += 1
        self.pinned.add(self.pins)
        return self.pins, Registered(region.address, region.nbytes, self.pins, self.pins)


@pytest.fixture
def large():
    with Region.private("arena", INLINE_MAX + 1) as region:
        yield region


async def test_a_large_region_is_pinned_once_and_off_the_loop(large):
    cards = [Card(), Card()]
    waiting = [asyncio.create_task(registered(cards, large)) for _ in range(3)]
    await asyncio.sleep(0.01)  # the loop runs on while nothing can be pinned
    waiting.pop().cancel()
    assert not any(task.done() for task in waiting)
    for card in cards:
        card.may.set()
    first, second = await asyncio.gather(*waiting)
    assert first == second == await registered(cards, large)
    assert [card.pins for card in cards] == [1, 1]
    for card in cards:
        await card.memory.settled()
        assert not card.pinned


async def test_a_region_withdrawn_while_it_is_pinned_is_not_told_to_anybody(large):
    card = Card()
    waiting = asyncio.create_task(registered([card], large))
    await asyncio.sleep(0.01)
    card.memory.withdraw("arena")
    again = asyncio.create_task(registered([card], large))
    await asyncio.sleep(0.01)
    card.may.set()
    with pytest.raises(Unusable, match="unregistered during its registration"):
        await waiting
    [keys] = await again
    assert card.pinned == {keys.lkey}
    card.memory.withdraw("arena")
    assert card.memory.known(large) is None
    await card.memory.settled()
    assert not card.pinned


async def test_closing_waits_for_the_thread_that_pins(large):
    card = Card()
    waiting = asyncio.create_task(registered([card], large))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(card.memory.settled())
    await asyncio.sleep(0.01)
    assert not closing.done()
    card.may.set()
    await closing
    assert card.pins == 1 and not card.pinned
    with pytest.raises(Unusable):
        await waiting


async def test_a_large_region_is_unpinned_off_the_loop(large):
    card, may, unpinning = Card(), threading.Event(), threading.get_ident()
    card.may.set()
    threads = []

    def unpin(handle):
        threads.append(threading.get_ident())
        assert may.wait(20)
        card.pinned.remove(handle)

    card.memory = Registrations(card._pin, unpin)
    await registered([card], large)
    card.memory.withdraw("arena")  # returns while the thread is at it
    assert card.memory.known(large) is None and card.pinned
    closing = asyncio.create_task(card.memory.settled())
    await asyncio.sleep(0.01)
    assert not closing.done()
    may.set()
    await closing
    assert not card.pinned and unpinning not in threads


async def test_memory_that_is_given_back_while_a_transfer_asks_its_peer_is_not_pinned_again(monkeypatch):
    """Its owner has unregistered it meanwhile; registered again, it would stay so for ever."""
    lib = SimpleNamespace(IBV_WR_RDMA_READ=1, IBV_WR_RDMA_WRITE=2)
    monkeypatch.setattr("net.transfer.rdma.link.verbs", lambda: SimpleNamespace(lib=lib))
    card = Card()
    card.may.set()
    for closes in (False, True):
        with Region.private("ours", 4096) as region:
            here = {"ours": region}
            link = Link(Wire(), [], Topology(()), here)
            link._devices.append(card)
            asking = asyncio.create_task(link.submit(Op.WRITE, region, "kv", [(0, 0, 8)]))
            await asyncio.sleep(0)
            if closes:
                region.close()
            else:
                del here["ours"]
            hear(link, op="region", name="kv", address=4096, nbytes=64, keys=[1], distances=[0])
            with pytest.raises(TransferError, match="'ours' is not registered here"):
                await asyncio.wait_for(asking, 5)
            assert not card.pins
            link._devices.clear()
            link.end("the test is over")


class Wire:
    """A connection to a peer that answers when the test says so."""

    peer_id = "peer"

    def __init__(self):
        self.sent = []

    def send(self, header):
        self.sent.append(header)


def hear(link, **header):
    link.frame(link.connection, Frame(header, memoryview(b"")))


async def test_a_region_that_is_withdrawn_right_behind_its_answer_is_asked_for_again():
    """Both frames may come in one turn of the loop, before the task that asked has run: an old key would stay."""
    link = Link(Wire(), [], Topology(()), {})
    told = {"op": "region", "name": "kv", "address": 4096, "nbytes": 64, "distances": []}
    asking = asyncio.create_task(link._region("kv"))
    await asyncio.sleep(0)
    hear(link, **told, keys=[1])
    hear(link, op="gone", region="kv")
    with pytest.raises(TransferError, match="not registered there any more"):
        await asking
    asking = asyncio.create_task(link._region("kv"))
    await asyncio.sleep(0)
    hear(link, **told, keys=[2])
    assert (await asking).keys == [2]
    assert [header["op"] for header in link.connection.sent] == ["region", "region"]
    link.end("the test is over")


async def test_a_link_that_ends_right_behind_the_answer_is_a_lost_peer(monkeypatch, large):
    lib = SimpleNamespace(IBV_WR_RDMA_READ=1, IBV_WR_RDMA_WRITE=2)
    monkeypatch.setattr("net.transfer.rdma.link.verbs", lambda: SimpleNamespace(lib=lib))
    link = Link(Wire(), [], Topology(()), {"arena": large})
    asking = asyncio.create_task(link.submit(Op.WRITE, large, "kv", [(0, 0, 8)]))
    await asyncio.sleep(0)
    hear(link, op="region", name="kv", address=4096, nbytes=64, keys=[], distances=[])
    link.end("the peer was killed")
    with pytest.raises(PeerLost):
        await asyncio.wait_for(asking, 5)
