"""Sums, the latency histogram, the limit of a rail, and all of it in a scrape."""

import asyncio
import math
from heapq import heappop, heappush

import pytest

from net.channel.channel import Channel
from net.channel.turns import Turns
from net.loop.clock import Clock
from net.loop.deadlines import Deadlines
from net.metrics.events import Metrics
from net.transfer.common.memory import Region
from net.transfer.common.traffic import LATENCY_BUCKETS_S, RailLimit, Traffic
from net.transfer.engine import URGENT, Op, TransferEngine, TransferError


def test_quantiles_are_bounds_of_buckets():
    traffic = Traffic()
    assert traffic.quantile_s(0.5) is None
    for seconds in [90e-6] * 98 + [3e-3] * 2:
        traffic.done(True, 1000, seconds)
    assert (traffic.quantile_s(0.5), traffic.quantile_s(0.98), traffic.quantile_s(0.99)) == (100e-6, 100e-6, 5e-3)
    traffic.done(False, 7, 1e9)
    assert traffic.quantile_s(1.0) is None
    assert (traffic.bytes_read, traffic.bytes_written, sum(traffic.latencies)) == (100_000, 7, 101)
    assert len(traffic.latencies) == len(LATENCY_BUCKETS_S) + 1


def test_a_rail_limit_spaces_bulk_and_lets_urgent_pass():
    limit = RailLimit(1000)
    assert limit.hold_s(10.0, 500, urgent=False) == pytest.approx(0.5)
    assert limit.hold_s(10.0, 500, urgent=False) == pytest.approx(1.0)
    assert limit.hold_s(10.0, 100, urgent=True) == pytest.approx(0.1)
    assert limit.hold_s(10.0, 100, urgent=False) == pytest.approx(1.2), "the urgent bytes have taken their time"
    assert limit.hold_s(99.0, 100, urgent=False) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="--rail-limit"):
        RailLimit(-1)


class VirtualClock(Clock):
    """Time passes when the test says so; who sleeps wakes in order, at its moment."""

    def __init__(self):
        self.time = 1000.0
        self.sleepers = []

    def now(self):
        return self.time

    async def sleep(self, seconds):
        woken = asyncio.get_running_loop().create_future()
        due = max(self.time + seconds, math.nextafter(self.time, math.inf))  # a little is not nothing
        heappush(self.sleepers, (due, id(woken), woken))
        await woken

    async def advance(self, seconds):
        end = self.time + seconds
        while self.sleepers and self.sleepers[0][0] <= end:
            self.time, _, woken = heappop(self.sleepers)
            woken.set_result(None)
            await self.turns()
        self.time = end
        await self.turns()

    @staticmethod
    async def turns():
        for _ in range(10):
            await asyncio.sleep(0)


async def test_the_engine_holds_submissions_back_and_shows_them_in_a_scrape():
    channel, clock = Channel("a", {}), VirtualClock()
    engine = TransferEngine(channel, rail_limit=1e6, clock=clock)
    metrics = Metrics("tiny", "a")
    metrics.watch_transfers(engine.snapshot)
    with Region.private("x", 1 << 16) as x:
        engine.register(x)
        bulk = asyncio.create_task(engine.submit("a", Op.WRITE, "x", "x", [(0, 1 << 15, 30_000)]))
        await clock.turns()
        urgent = asyncio.create_task(engine.submit("a", Op.READ, "x", "x", [(0, 100, 10)], priority=URGENT))
        later = asyncio.create_task(engine.submit("a", Op.WRITE, "x", "x", [(0, 1 << 15, 5_000)]))
        await clock.turns()
        await clock.advance(9e-6)
        assert not urgent.done()
        await clock.advance(2e-6)
        assert urgent.done() and (await urgent).seconds == pytest.approx(10e-6)
        await clock.advance(0.0299)
        assert not bulk.done()
        await clock.advance(0.0001)
        assert bulk.done() and (await bulk).seconds == pytest.approx(0.03)
        await clock.advance(0.0049)
        assert not later.done()
        await clock.advance(0.0002)
        assert later.done() and (await later).seconds == pytest.approx(0.03501), "behind the bulk, with the urgent"
        failing = asyncio.create_task(engine.submit("a", Op.READ, "x", "nothing", [(0, 0, 1)]))
        await clock.turns()
        await clock.advance(1.0)
        with pytest.raises(TransferError):
            await failing
    metrics.read()
    await engine.close()
    await channel.close()
    labels = {"model_name": "tiny", "engine": "a", "peer": "a", "transport": "local"}

    def value(name, **more):
        return metrics.registry.get_sample_value(f"mooncake:peer_transfer_{name}", labels | more)

    assert value("bytes_total", direction="write") == 35_000
    assert value("bytes_total", direction="read") == 10
    assert value("failures_total") == 1
    assert value("retries_total") == 0
    assert value("latency_seconds_count") == 3
    assert [value("latency_seconds_bucket", le=le) for le in ("2e-05", "0.02", "0.05")] == [1, 1, 3]
    assert value("gb_per_s") == pytest.approx(35_010 / (0.06502 * 1e9))
    assert metrics.registry.get_sample_value("mooncake:peer_path", labels | {"why": "the peer is this node"}) == 1
    assert b"mooncake:peer_transfer_latency_seconds_bucket" in metrics.text()


async def test_one_timer_serves_short_and_long_deadlines():
    deadlines = Deadlines()
    hit = []

    async def wait(timeout_s, needed_s):
        deadline = deadlines.start(timeout_s)
        try:
            await asyncio.sleep(needed_s)
        except asyncio.CancelledError:
            hit.append(timeout_s)
            assert deadline.was_hit()
        finally:
            deadlines.end(deadline)

    deadlines.end(deadlines.start(0.005))  # its time comes, and it is nobody's
    await asyncio.gather(wait(60.0, 0.03), wait(0.01, 60.0), wait(0.02, 60.0))
    assert hit == [0.01, 0.02]
    deadlines.close()


async def test_turns_are_one_per_loop_turn_in_order_of_asking():
    turns = Turns()
    order = []

    async def work(name):
        for _ in range(2):
            await turns.wait()
            order.append(name)

    gone = asyncio.create_task(work("gone"))
    rest = [asyncio.create_task(work(name)) for name in "abc"]
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*rest)
    assert order == ["gone", *"abcabc"]
    await asyncio.sleep(0)
    assert turns.take()
    assert not turns.take(), "this one is taken"
    await asyncio.sleep(0)
