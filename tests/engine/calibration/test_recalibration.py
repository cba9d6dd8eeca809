"""A node without requests corrects what a disturbed start has measured, and a request ends the check."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cache.pool.block_pool import BlockPool
from engine.calibration.calibration import Room, calibrate
from engine.calibration.recalibration import BLOCKS, Recalibration
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.core.worker import Reuse, Worker
from engine.handoff.reuse import Publisher
from engine.sampling.sampler import Sampled
from engine.step.request import Request
from net.metrics.events import Metrics
from sched.idle_checks import FIRST_S, SHARE, Verdict
from tests.engine.calibration.test_calibration import Machine, decode_s, prefill_s
from tests.engine.core.test_worker import NoPrefix, request, until

ROOM = Room((), 16, 1024, 64, 2048)


class Node:
    """A worker whose steps take what a formula says, on a clock of their own. Its start was disturbed: all steps took
    `slow` times as long."""

    def __init__(self, slow: float, num_blocks: int = 400) -> None:
        self.machine, self.pool = Machine(slow), BlockPool(num_blocks)
        metrics, costs = Metrics("m", "n"), StepCosts()
        batcher = Batcher(self.pool, 16, 64, 1024, 4096, {0})
        reuse = Reuse(NoPrefix(), Publisher(self.pool, None, metrics))
        self.worker = Worker(batcher, self.machine, reuse, costs, metrics)  # type: ignore[arg-type]
        self.freed = 0
        self.checks = Recalibration(self.worker, ROOM, 0.5, self._freed, self.machine.clock)
        calibrate(self.machine, costs, Room(range(num_blocks), 16, 1024, 64, 2048), 0.5, self.machine.clock)  # type: ignore
        self.machine.slow = 1.0

    def _freed(self) -> None:
        self.freed += 1

    def estimate(self) -> tuple[float, float]:
        costs = self.worker.costs
        return costs.prefill.estimate(100, 0), costs.decode.estimate(3, 300)

    async def close(self) -> None:
        await self.checks.close()
        await self.worker.close()
        self.pool.check_integrity()
        assert self.pool.references() == {"request": 0, "transfer": 0} and not self.checks.lent


TRUTH = (pytest.approx(prefill_s(100), rel=0.2), pytest.approx(decode_s(3, 300), rel=0.2))


@pytest.mark.parametrize("slow", [12.0, 2.0, 0.2])
async def test_a_disturbed_start_is_corrected(slow):
    node = Node(slow)
    costs = node.worker.costs
    assert node.estimate()[0] == pytest.approx(slow * prefill_s(100), rel=0.3)
    costs.mixed.observe(2, 200, 50, 0, 1.0)
    costs._log_ratio = 1.0
    for i in range(8):
        costs.served.computed(str(i), 0.0, (1.0, 100.0, 100.0 * 100.0), 0.0)
        costs.handed_out(str(i), 5.0)
    assert await node.checks.check() is Verdict.WRONG and node.freed == 1
    assert node.estimate() == TRUTH and costs.residual == 1.0 and costs.mixed.regression is None
    assert costs.prompt_coefficients == costs.prefill.coefficients
    assert await node.checks.check() is Verdict.RIGHT
    assert node.checks.state()["wrong"] == node.checks.state()["right"] == 1
    await node.close()


async def test_right_models_stay_and_a_check_is_a_few_small_steps():
    node = Node(1.0)
    before, steps, estimate = node.machine.now, len(node.machine.steps), node.estimate()
    assert await node.checks.check() is Verdict.RIGHT
    assert node.estimate() == estimate and len(node.machine.steps) - steps == 12
    assert node.machine.now - before < 6 * (prefill_s(16) + prefill_s(64) + decode_s(1, 65) + decode_s(4, 260))
    await node.close()


async def test_it_leaves_cached_blocks_and_those_of_requests_alone():
    node = Node(3.0, num_blocks=640)
    taken = node.pool.allocate(640)
    for block in taken[:500]:
        node.pool.name(block, block.to_bytes(16, "big"))
    node.pool.release(taken[:600])
    begin = len(node.machine.steps)
    assert await node.checks.check() is Verdict.WRONG
    used = {block for rows in node.machine.steps[begin:] for row in rows for block in row.block_ids}
    assert used <= set(taken[500:600]) and node.pool.usage()["evictions"] == 0
    rest = node.pool.allocate(100)  # the arena is full of cached blocks, as after a long time
    await node.checks.check()
    assert node.pool.usage()["evictions"] == 640 // 64
    node.pool.release([*rest, *taken[600:]])
    await node.close()


async def test_a_request_ends_the_check_with_its_step():
    """It comes while the third step runs, and finds its first step next."""
    node = Node(5.0)
    got: list[Any] = []
    third, go_on = threading.Event(), threading.Event()
    begin, step = len(node.machine.steps), node.machine.step

    def slow_step(rows: Any, on_layer: Any = None, before_layer: Any = None) -> Any:
        step(rows)
        if len(node.machine.steps) - begin == 3:
            third.set()
            assert go_on.wait(10)
        return [[Sampled(100)] if row.sample else [] for row in rows]

    node.machine.step, node.machine.losses, node.machine.ahead = slow_step, {}, {}  # type: ignore
    node.worker.start(got.extend)
    learned = node.worker.costs.prefill.regression
    known = learned.observations
    check = asyncio.create_task(node.checks.check())
    await until(third.is_set)
    one: Request = request("r", max_tokens=1)
    node.worker.add(one)
    go_on.set()
    assert await check is Verdict.CUT and node.freed == 1
    await until(lambda: got)
    assert len(node.machine.steps) - begin == 4, "three of the check, one of the request"
    assert node.worker.costs.prefill.regression is learned and learned.observations == known + 1, "of the request"
    await node.close()


async def test_it_checks_by_itself_and_never_beside_requests(monkeypatch):
    node = Node(4.0)
    monkeypatch.setattr("engine.calibration.recalibration.POLL_S", 0.001)
    clock, started = node.machine, node.machine.now
    node.checks.start()
    held = request("r")
    node.worker.batcher.add(0.0, held)
    clock.now += 10 * FIRST_S
    for _ in range(20):
        clock.now += 0.5
        await until(lambda: True)
    assert not any(node.checks._checks.values())
    node.worker.batcher.abort(0.0, "r")
    ticks = 0
    while not node.checks._checks[Verdict.RIGHT]:
        clock.now += 0.5
        ticks += 1
        assert ticks < 2000
        await asyncio.sleep(0.002)
    assert node.checks._checks[Verdict.WRONG] == 1 and node.estimate() == TRUTH
    assert node.checks._spent_s <= SHARE * (clock.now - started) + 0.6
    assert node.pool.num_blocks > BLOCKS
    await node.close()


async def test_its_state_says_when_the_next_check_may_begin_and_that_one_runs(monkeypatch):
    node = Node(1.0)
    monkeypatch.setattr("engine.calibration.recalibration.POLL_S", 0.001)
    begun, go_on, step = threading.Event(), threading.Event(), node.machine.step

    def held_step(rows: Any, on_layer: Any = None, before_layer: Any = None) -> Any:
        begun.set()
        assert go_on.wait(10)
        return step(rows)

    node.machine.step = held_step  # type: ignore
    node.checks.start()
    assert node.checks.state()["wait_s"] == pytest.approx(FIRST_S)
    node.machine.now += FIRST_S
    await until(begun.is_set)
    assert node.checks.state()["wait_s"] == 0.0
    go_on.set()
    await until(lambda: node.checks.state()["right"] == 1 and node.checks.state()["spent_s"])
    assert node.checks.state()["wait_s"] >= FIRST_S
    await node.close()
