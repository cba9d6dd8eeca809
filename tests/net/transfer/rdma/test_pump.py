"""Jobs over RDMA rails against queue pairs that fail as they like: no verbs, no device."""

import asyncio
import random

import pytest

from net.errors import PeerLost, TransferError
from net.transfer.common.rails import Rail
from net.transfer.common.transport import BULK, URGENT, Op
from net.transfer.rdma import pump
from net.transfer.rdma.job import SLICE_ATTEMPTS, SLICE_BYTES, Submission
from net.transfer.rdma.pump import BULK_WINDOW, Pump
from tests.net.peers import until

DEPTH = 16


class Pair:
    """A queue pair of DEPTH requests; the test says when they are over."""

    def __init__(self, pump, index):
        self.pump, self.index = pump, index
        self.queue = []
        self.ready = True

    @property
    def room(self):
        return DEPTH - len(self.queue) if self.ready else 0

    def post(self, requests):
        assert self.ready and len(requests) <= self.room
        self.queue += requests

    def finish(self, count):
        done, self.queue = self.queue[:count], self.queue[count:]
        self.pump.done_on(self.index)(done)

    def fail(self, refused=False):
        if self.ready:
            failed, self.queue, self.ready = self.queue, [], False
            self.pump.error_on(self.index)(failed, "it broke", refused)

    def break_off(self, why):
        self.fail()


class Net:
    """Rails between two memories; `landed` counts how often a slice has arrived."""

    def __init__(self, count, distances=()):
        self.broken = []
        self.landed = {}
        self.pieces = []
        self.pump = Pump([Rail(f"r{i}", up=True) for i in range(count)], self.broken.append)
        self.pump.pairs += [Pair(self.pump, i) for i in range(count)]
        self.distances = distances

    def start(self, nbytes, op=Op.WRITE, priority=BULK, once=False):
        job = Submission(op, once=once, priority=priority, distances=self.distances)
        job.add([(0, 0, nbytes)], lambda index, piece: piece)
        self.pieces += job.waiting
        return job, asyncio.create_task(self.pump.run(job))

    def arrive(self, index, count):
        for piece in self.pump.pairs[index].queue[:count]:
            self.landed[id(piece)] = self.landed.get(id(piece), 0) + 1
        self.pump.pairs[index].finish(count)

    def settle(self, index):
        """The peer confirms that the broken pair takes nothing any more."""
        for job in list(self.pump.jobs):
            job.settled(index)

    def revive(self, index):
        self.pump.pairs[index].ready = True
        self.pump.rails[index].opened()
        self.pump.pump()


@pytest.mark.parametrize("seed", range(25))
async def test_every_job_ends_whole_on_rails_that_break_and_come_back(seed):
    rng = random.Random(seed)
    print("seed", seed)
    net = Net(rng.randint(1, 3))
    jobs = [net.start(rng.randint(1, 40) * SLICE_BYTES + rng.randint(0, 9), rng.choice(list(Op))) for _ in range(4)]
    failures = {id(job): 0 for job, _ in jobs}
    await asyncio.sleep(0)
    for _ in range(4000):
        if all(task.done() for _, task in jobs):
            break
        index = rng.randrange(len(net.pump.pairs))
        pair = net.pump.pairs[index]
        if not pair.ready:
            net.settle(index)
            net.revive(index)
        elif pair.queue and rng.random() < 0.03 and all(piece.attempts < SLICE_ATTEMPTS - 2 for piece in pair.queue):
            for piece in pair.queue:  # an unacknowledged slice may have landed all the same
                net.landed[id(piece)] = net.landed.get(id(piece), 0) + rng.randint(0, 1)
                failures[id(piece.job)] += 1
            pair.fail()
        elif pair.queue:
            net.arrive(index, rng.randint(1, len(pair.queue)))
        await asyncio.sleep(0)
    for job, task in jobs:
        await task
        assert job.idle and not job.waiting
    assert all(rail.in_flight == 0 for rail in net.pump.rails)
    assert not net.pump.jobs
    assert all(net.landed[id(piece)] for piece in net.pieces)
    assert sum(rail.resent for rail in net.pump.rails) == sum(failures.values())


async def test_a_write_that_went_again_waits_for_the_word_of_the_peer():
    """A late first try must not land in memory that is reused; a READ writes at home, where the reset was the fence."""
    for op in Op:
        net = Net(2)
        _, task = net.start(4 * SLICE_BYTES, op)
        await asyncio.sleep(0)
        net.pump.pairs[0].fail()
        assert net.broken == [0]
        while net.pump.pairs[1].queue:
            net.arrive(1, 1)
        if op is not Op.READ:
            for _ in range(50):
                await asyncio.sleep(0)
            assert not task.done()
            net.settle(0)
        await task


async def test_urgent_slices_do_not_queue_behind_all_of_the_bulk():
    net = Net(1)
    _, bulk = net.start(64 * SLICE_BYTES)
    await asyncio.sleep(0)
    pair = net.pump.pairs[0]
    assert len(pair.queue) == BULK_WINDOW // SLICE_BYTES < DEPTH
    _, urgent = net.start(SLICE_BYTES, priority=URGENT)
    await asyncio.sleep(0)
    assert len(pair.queue) == BULK_WINDOW // SLICE_BYTES + 1, "there was room kept for it"
    net.arrive(0, len(pair.queue))
    await urgent
    assert not bulk.done()
    while not bulk.done():
        net.arrive(0, 1)
        await asyncio.sleep(0)


async def test_far_rails_are_used_while_the_near_one_is_down():
    net = Net(2, distances=[1, 0])
    far, near = net.pump.pairs
    _, task = net.start(8 * SLICE_BYTES)
    await asyncio.sleep(0)
    assert near.queue and not far.queue
    near.fail()
    assert len(far.queue) == 8
    net.settle(1)
    net.arrive(0, 8)
    await task


async def test_an_atomic_is_not_tried_twice_and_a_slice_not_for_ever():
    net = Net(1)
    _, task = net.start(8, Op.READ, once=True)
    await asyncio.sleep(0)
    net.pump.pairs[0].fail()
    with pytest.raises(TransferError, match="may or may not have taken effect"):
        await task
    net = Net(1)
    _, task = net.start(8, Op.READ)
    await asyncio.sleep(0)
    for _ in range(SLICE_ATTEMPTS):
        net.pump.pairs[0].fail()
        net.revive(0)
    with pytest.raises(TransferError, match=f"failed {SLICE_ATTEMPTS} times"):
        await task


async def test_refused_memory_fails_its_transfer_alone_and_the_rail_may_come_back_at_once():
    net = Net(1)
    _, bad = net.start(SLICE_BYTES)
    _, good = net.start(SLICE_BYTES)
    await asyncio.sleep(0)
    net.pump.pairs[0].fail(refused=True)
    assert net.pump.rails[0].retry_at == 0.0
    net.settle(0)
    with pytest.raises(TransferError, match="refused"):
        await bad
    net.revive(0)
    net.arrive(0, 1)
    await good


async def test_refused_memory_fails_its_transfer_once_no_other_rail_moves_any_of_it():
    """The caller may free the memory when the transfer has failed: the other rail's card must have let go of it."""
    for op in Op:
        net = Net(2)
        _, bad = net.start(12 * SLICE_BYTES, op)
        await asyncio.sleep(0)
        refusing, other = net.pump.pairs
        assert refusing.queue and other.queue
        refusing.fail(refused=True)
        while other.queue:
            await asyncio.sleep(0.001)
            assert not bad.done(), "slices of it are in the queue of the other rail"
            net.arrive(1, 1)
        await asyncio.wait([bad], timeout=30 if op is Op.READ else 0.001)
        assert bad.done() == (op is Op.READ), "a late WRITE may still land there"
        net.settle(0)
        with pytest.raises(TransferError, match="refused"):
            await bad
        assert not other.queue, "nothing of a failed transfer is posted again"


async def test_a_slice_that_failed_too_often_ends_its_transfer_once_the_others_are_still():
    net = Net(2)
    _, task = net.start(2 * SLICE_BYTES, Op.READ)
    await asyncio.sleep(0)
    net.pump.pairs[0].queue[0].attempts = SLICE_ATTEMPTS - 1
    net.pump.pairs[0].fail()
    await asyncio.sleep(0.001)
    assert not task.done() and len(net.pump.pairs[1].queue) == 1
    net.arrive(1, 1)
    with pytest.raises(TransferError, match=f"failed {SLICE_ATTEMPTS} times"):
        await task
    assert not net.pump.pairs[1].queue


async def test_cancelled_twice_it_still_waits_for_what_is_in_the_queues():
    net = Net(1)
    _, task = net.start(4 * SLICE_BYTES)
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.001)
        assert not task.done()
    net.arrive(0, 4)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_write_on_a_stuck_rail_waits_for_the_word_of_the_peer(monkeypatch):
    monkeypatch.setattr(pump, "CANCEL_S", 0.01)
    net = Net(2)
    _, task = net.start(4 * SLICE_BYTES)
    await asyncio.sleep(0)
    task.cancel()
    await until(lambda: net.broken)
    assert sorted(net.broken) == [0, 1]
    await asyncio.sleep(0.03)
    net.settle(0)
    await asyncio.sleep(0.001)
    assert not task.done(), "packets of rail 1 may still land at the peer"
    net.settle(1)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_job_that_comes_after_the_end_is_told_at_once():
    net = Net(1)
    net.pump.end(PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        await asyncio.wait_for(net.start(SLICE_BYTES)[1], 5)


async def test_cancelling_waits_for_what_is_in_the_queues():
    net = Net(1)
    _, task = net.start(40 * SLICE_BYTES)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    posted = len(net.pump.pairs[0].queue)
    net.arrive(0, posted)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not net.pump.pairs[0].queue, "nothing more was posted"


async def test_a_lost_peer_fails_everything():
    net = Net(2)
    tasks = [net.start(4 * SLICE_BYTES)[1] for _ in range(3)]
    await asyncio.sleep(0)
    net.pump.end(PeerLost("gone"))
    for task in tasks:
        with pytest.raises(PeerLost):
            await task
