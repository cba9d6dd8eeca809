"""Broken rails brought back: fence first, then a new generation, with back-off; no verbs, no device."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from net.errors import PeerLost
from net.transfer.common import rails
from net.transfer.common.rails import Rail
from net.transfer.common.transport import Op
from net.transfer.rdma import pump
from net.transfer.rdma.job import SLICE_BYTES, Submission
from net.transfer.rdma.pump import Pump
from net.transfer.rdma.revival import Revival
from tests.net.peers import until
from tests.net.transfer.rdma.test_pump import Pair


class Device:
    def __init__(self):
        self.active = True
        self.on_port = []

    def port(self, active):
        self.active = active
        for listener in self.on_port:
            listener(active)


class Questions:
    """Answers of the peer, in the order of asking; an exception is raised."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    async def ask(self, answer, question):
        self.asked.append((question["op"], question["rail"]))
        found = self.answers.pop(0) if self.answers else {"endpoint": "theirs"}
        if isinstance(found, BaseException):
            raise found
        return found


class Rails:
    """Two rails that are up."""

    def __init__(self, monkeypatch, *answers):
        monkeypatch.setattr(rails, "BACKOFF_S", 0.01)
        self.devices = [Device(), Device()]
        self.joined, self.given_up, self.resets = [], [], []
        self.questions = Questions(list(answers))
        self.pump = Pump([Rail("r0", up=True, backoff_s=0.01), Rail("r1", up=True)], lambda i: self.revival.revive(i))
        for index in range(2):
            pair = Pair(self.pump, index)
            pair.reset = lambda index=index: self.resets.append(index)
            pair.endpoint = lambda: SimpleNamespace(to_json=lambda: "ours")
            pair.break_off = lambda why, pair=pair: pair.fail()
            self.pump.pairs.append(pair)
        self.revival = Revival(self.devices, self.pump, self.questions, self.join, self.given_up.append)

    def join(self, index, theirs):
        if theirs != "theirs":
            raise ValueError(theirs)
        self.joined.append(index)
        self.pump.pairs[index].ready = True
        self.pump.rails[index].opened()


async def test_the_other_side_is_fenced_before_a_new_generation_starts(monkeypatch):
    one = Rails(monkeypatch)
    one.pump.pairs[0].fail()
    one.revival.revive(0)
    await until(lambda: one.pump.rails[0].up)
    assert one.questions.asked == [("stop", 0), ("start", 0)], "asked once, though told twice"
    assert (one.joined, one.resets) == ([0], [0])
    one.revival.end()
    one.revival.end()
    assert not any(device.on_port for device in one.devices)


async def test_a_peer_that_cannot_yet_is_asked_again_later_each_time(monkeypatch):
    no = {"reason": "no such device"}
    one = Rails(monkeypatch, {}, no, no, TimeoutError(), {"endpoint": "theirs"})
    one.pump.pairs[0].fail()
    await until(lambda: one.pump.rails[0].up)
    assert [op for op, _ in one.questions.asked] == ["stop", *["start"] * 4]
    assert one.pump.rails[0].backoff_s == pytest.approx(0.01 * 2**4), "doubled by the failure and three tries"
    one.revival.end()


async def test_a_port_that_goes_down_breaks_its_rail_and_coming_up_ends_the_wait(monkeypatch):
    one = Rails(monkeypatch)
    one.devices[0].port(False)
    assert not one.pump.rails[0].up and one.pump.rails[1].up
    one.pump.rails[0].backoff_s = 1000.0
    await until(lambda: one.pump.rails[0].retry_at > time.monotonic() + 500)
    assert ("start", 0) in one.questions.asked and not one.joined, "a link that is down is not joined"
    one.devices[0].port(True)
    await until(lambda: one.joined == [0])
    one.devices[1].port(True)  # it was up
    await asyncio.sleep(0.01)
    assert one.joined == [0]
    one.revival.end()


async def test_a_peer_that_does_not_confirm_the_fence_is_given_up(monkeypatch):
    one = Rails(monkeypatch, TimeoutError())
    one.pump.pairs[1].fail()
    await until(lambda: one.given_up == ["it does not answer about a broken rail"])
    one = Rails(monkeypatch, PeerLost("gone"))
    one.pump.pairs[1].fail()
    await until(lambda: one.questions.asked == [("stop", 1)])
    await asyncio.sleep(0.02)
    assert not one.given_up and not one.joined
    one.revival.end()
    one.pump.rails[0].up = False
    one.revival.revive(0)
    await asyncio.sleep(0)
    assert one.questions.asked == [("stop", 1)], "nothing is revived after the end"


@pytest.mark.parametrize("op", list(Op))
async def test_a_transfer_to_a_peer_that_is_cut_ends_with_its_deadline_whatever_the_cards_say(monkeypatch, op):
    """They may say nothing, because Soft-RoCE repeats a request with RETRIES for ever, and TCP may not have noticed. A
    READ ends when its queues are broken off; a WRITE when the peer does not confirm that, with the link."""
    monkeypatch.setattr(pump, "CANCEL_S", 0.01)
    one = Rails(monkeypatch, TimeoutError(), TimeoutError())
    one.revival._give_up = lambda reason: one.pump.end(PeerLost(reason))  # as Link does
    job = Submission(op)
    job.add([(0, 0, 9 * SLICE_BYTES)], lambda index, piece: piece)

    async def transfer():
        async with asyncio.timeout(0.01):
            await one.pump.run(job)

    task = asyncio.create_task(transfer())
    await until(task.done)
    with pytest.raises(TimeoutError):
        await task
    assert job.idle == (op is Op.READ) and not one.pump.jobs
    await until(lambda: len(one.questions.asked) == 2)
    assert one.questions.asked == [("stop", 0), ("stop", 1)] and not one.joined
    one.revival.end()


async def test_a_rail_that_breaks_while_it_is_being_brought_back_is_brought_back_again(monkeypatch):
    """Its first slice fails inside the join, or right behind it, when the task of the revival has not ended yet."""
    one = Rails(monkeypatch)
    plain, breaks = one.join, [True, False]

    def join(index, theirs):
        plain(index, theirs)
        if breaks.pop(0):
            one.pump.pairs[index].fail()

    one.revival._join = join
    one.pump.pairs[0].fail()
    await until(lambda: not breaks)
    await until(lambda: one.pump.rails[0].up)
    assert [op for op, _ in one.questions.asked] == ["stop", "start"] * 2, "fenced again: slices went by it"
    one.revival.end()
