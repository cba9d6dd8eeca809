"""Sums, the latency histogram, the limit of a rail, and all of it in a scrape."""

import asyncio

import pytest

from net.channel import Channel
from net.deadlines import Deadlines
from net.memory import Region
from net.metrics import Metrics
from net.traffic import LATENCY_BUCKETS_S, RailLimit, Traffic
from net.transfer import URGENT, Op, TransferEngine, TransferError
from net.turns import Turns


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


async def test_the_engine_holds_submissions_back_and_shows_them_in_a_scrape():
    channel = Channel("a", {})
    engine = TransferEngine(channel, rail_limit=1e6)
    metrics = Metrics("tiny", "a")
    metrics.watch_transfers(engine.snapshot)
    with Region.private("x", 1 << 16) as x:
        engine.register(x)
        bulk = asyncio.create_task(engine.submit("a", Op.WRITE, "x", "x", [(0, 1 << 15, 30_000)]))
        await asyncio.sleep(0)
        done = await engine.submit("a", Op.READ, "x", "x", [(0, 100, 10)], priority=URGENT)
        assert not bulk.done()
        assert done.seconds >= 10 / 1e6
        assert (await bulk).seconds >= 0.03
        with pytest.raises(TransferError):
            await engine.submit("a", Op.READ, "x", "nothing", [(0, 0, 1)])
    await engine.close()
    await channel.close()
    labels = {"model_name": "tiny", "engine": "a", "peer": "a", "transport": "local"}

    def value(name, **more):
        return metrics.registry.get_sample_value(f"mooncake:peer_transfer_{name}", labels | more)

    assert value("bytes_total", direction="write") == 30_000
    assert value("bytes_total", direction="read") == 10
    assert value("failures_total") == 1
    assert value("retries_total") == 0
    assert value("latency_seconds_count") == 2
    assert value("latency_seconds_bucket", le="0.02") <= 1, "the bulk was held for 30 ms"
    assert value("gb_per_s") > 0
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

    await asyncio.gather(wait(5.0, 0.03), wait(0.01, 5.0), wait(0.02, 5.0), wait(0.005, 0.0))
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
