"""What the scheduler and a scrape may read of the speed of rails."""

import pytest

from net.metrics.events import Metrics
from net.transfer.common.memory import Region
from net.transfer.common.traffic import Traffic
from net.transfer.engine import URGENT, Op, TransferEngine
from tests.net.peers import channels


def test_the_mean_moves_and_small_submissions_do_not_move_it():
    traffic = Traffic()
    traffic.done(True, 4096, 1e-6)
    assert traffic.bytes_per_s == 0.0, "latency is not bandwidth"
    traffic.done(True, 4 << 20, (4 << 20) / 2e9)
    assert traffic.bytes_per_s == pytest.approx(2e9)
    for _ in range(60):
        traffic.done(False, 4 << 20, (4 << 20) / 5e9)
    assert traffic.bytes_per_s == pytest.approx(5e9, rel=0.01)


@pytest.mark.parametrize("order", ["shm", "tcp"])
async def test_a_transport_with_one_way_has_its_name(order):
    async with channels("a", "b") as made:
        a, b = (TransferEngine(channel, (order,)) for channel in made)
        with Region.shared("x", 4 << 20) as x, Region.shared("y", 4 << 20) as y:
            a.register(x)
            b.register(y)
            assert a.bandwidth("b") == {}
            await a.submit("b", Op.WRITE, "x", "y", [(0, 0, 4 << 20)])
            found = a.bandwidth("b")
            assert found and all(rate > 0 for rate in found.values())
            assert a.bandwidth("a") == a.bandwidth("nobody") == {}
            for engine in (a, b):
                await engine.close()


async def test_a_limit_is_part_of_the_estimate():
    async with channels("a", "b") as made:
        a = TransferEngine(made[0], ("tcp",), rail_limit=500e6)
        b = TransferEngine(made[1], ("tcp",))
        with Region.shared("x", 4 << 20) as x, Region.shared("y", 4 << 20) as y:
            a.register(x)
            b.register(y)
            await a.submit("b", Op.WRITE, "x", "y", [(0, 0, 1000)])
            assert a.bandwidth("b") == {}, "latency is not bandwidth, and a guess no estimate"
            await a.submit("b", Op.WRITE, "x", "y", [(0, 0, 4 << 20)])
            rates = a.bandwidth("b")
            assert sum(rates.values()) <= 500e6 * 1.001
            for rail in a._transports["tcp"]._bundles["b", "data"].rails:
                rail.bytes_per_s, rail.measured = 3e9, True
            assert a.bandwidth("b") == pytest.approx({"tcp0": 250e6, "tcp1": 250e6})
            for engine in (a, b):
                await engine.close()


async def test_what_is_urgent_has_rails_of_its_own():
    async with channels("a", "b") as made:
        a, b = (TransferEngine(channel, ("tcp",)) for channel in made)
        with Region.shared("x", 4 << 20) as x, Region.shared("y", 4 << 20) as y:
            a.register(x)
            b.register(y)
            await a.submit("b", Op.WRITE, "x", "y", [(0, 0, 4 << 20)], priority=URGENT)
            (rate,) = a.bandwidth("b").items()
            assert rate[0] == "tcp-urgent0" and rate[1] > 0, "a prompt's KV is urgent: often there is nothing else"
            bulk = a._transports["tcp"]._bundles["b", "data"].rails
            bulk[0].bytes_per_s, bulk[0].measured = 2 * rate[1], True
            assert a.bandwidth("b") == {"tcp0": pytest.approx(2 * rate[1])}
            rows = {row["rail"]: row["bytes"] for row in a.snapshot()[0]["rails"]}
            assert rows == {"tcp0": 0, "tcp1": 0, "tcp-urgent0": 4 << 20, "tcp-urgent1": 0}
            for engine in (a, b):
                await engine.close()


def test_rails_are_in_a_scrape():
    rail = {"rail": "mlx5_0", "up": True, "gb_per_s": 20.5, "bytes": 7, "in_flight": 0, "failures": 2, "resent": 3}
    row = {
        "peer": "p",
        "transport": "rdma",
        "why": "RDMA",
        "retries": 3,
        "rails": [rail, rail | {"rail": "mlx5_1", "up": False}],
    }
    metrics = Metrics("tiny", "a")
    metrics.watch_transfers(lambda: [row | Traffic().row()])
    metrics.read()
    labels = {"model_name": "tiny", "engine": "a", "peer": "p", "transport": "rdma", "rail": "mlx5_0"}

    def value(name, **more):
        return metrics.registry.get_sample_value(f"mooncake:rail_{name}", labels | more)

    assert (value("gb_per_s"), value("up"), value("bytes_total"), value("failures_total")) == (20.5, 1.0, 7.0, 2.0)
    assert value("up", rail="mlx5_1") == 0.0
