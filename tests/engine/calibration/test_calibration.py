"""Calibration: models know the machine after it, within the time and room given."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cache.pool.block_pool import BlockPool
from cache.pool.policy import LRU
from engine.calibration.calibration import Room, calibrate
from engine.config.config import Config
from engine.core.costs import RESIDUAL_STEPS, StepCosts
from engine.node.engine import Engine
from engine.step.step import ScheduledRow, Step

ROOM = Room(blocks=range(1000), block_size=16, max_tokens=1024, max_requests=64, max_context=2048)


def prefill_s(n: int, start: int = 0) -> float:
    return 1e-3 + 2e-4 * n + 1e-9 * n * (n + 2 * start)


def decode_s(batch: int, context: int) -> float:
    return 2e-3 + 1e-4 * batch + 1e-8 * context


class Machine:
    """A runner whose steps take what a formula says, on a clock of its own. The first `cold` steps of each shape take
    longer: 3 times as long if there are several, half as long again if there is one."""

    def __init__(self, slow: float = 1.0, cold: int = 1) -> None:
        self.now, self.slow, self.cold, self.seen, self.steps = 0.0, slow, cold, Counter(), []

    def step(self, rows) -> None:
        n, start, batch = len(rows[0].token_ids), rows[0].start, len(rows)
        took = prefill_s(n, start) if batch == 1 and n > 1 else decode_s(batch, batch * (start + 1))
        warm = self.seen[n, start, batch] >= self.cold
        self.now += self.slow * took * (1.0 if warm else 1.5 if self.cold == 1 else 3.0)
        self.seen[n, start, batch] += 1
        self.steps.append(rows)

    def clock(self) -> float:
        return self.now


def test_estimates_are_this_machines_after_it():
    machine, costs = Machine(), StepCosts()
    assert calibrate(machine, costs, ROOM, 5.0, machine.clock) >= 12
    for n, context in ((48, 0), (800, 0), (200, 1000)):
        truth = 1e-3 + 2e-4 * n + 1e-9 * n * (n + 2 * context)
        assert costs.prefill.estimate(n, context) == pytest.approx(truth, rel=0.1)
    assert costs.decode.estimate(24, 24 * 300) == pytest.approx(2e-3 + 24e-4 + 1e-8 * 7200, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
def test_it_keeps_its_time(seconds):
    machine = Machine(slow=10.0)
    calibrate(machine, StepCosts(), ROOM, seconds, machine.clock)
    least_s = 2.5 * 10.0 * (prefill_s(16) + prefill_s(64) + decode_s(1, 65) + decode_s(4, 4 * 65))
    longest = machine.now / max(1, len(machine.steps)) * 2  # of a shape that no estimate was right about yet
    assert machine.now <= (max(seconds, least_s) + 2 * longest if seconds else 0.0)


def test_a_machine_that_is_too_slow_for_the_time_is_measured_all_the_same():
    """One step of one kind left the other one to a prior: 3 ms for a decode step that takes 45."""
    machine, costs = Machine(slow=100.0), StepCosts()
    assert calibrate(machine, costs, ROOM, 0.5, machine.clock) == 3
    assert costs.prefill.estimate(40, 0) == pytest.approx(100 * prefill_s(40), rel=0.15)
    assert costs.decode.estimate(2, 2 * 65) == pytest.approx(100 * decode_s(2, 2 * 65), rel=0.15)
    machine, costs = Machine(slow=100.0), StepCosts()
    assert calibrate(machine, costs, ROOM, 0.05, machine.clock) == 2
    assert costs.decode.estimate(1, 65) == pytest.approx(100 * decode_s(1, 65), rel=0.01)
    assert costs.prefill.estimate(16, 0) == pytest.approx(100 * prefill_s(16), rel=0.01)


def test_shapes_are_measured_again_until_the_estimates_are_right():
    machine, costs = Machine(cold=2), StepCosts()
    assert calibrate(machine, costs, ROOM, 60.0, machine.clock) > 24
    assert costs.prefill.estimate(400, 0) == pytest.approx(prefill_s(400), rel=0.3)
    assert costs.decode.estimate(24, 24 * 300) == pytest.approx(decode_s(24, 24 * 300), rel=0.3)
    steady, costs = Machine(), StepCosts()
    assert calibrate(steady, costs, ROOM, 60.0, steady.clock) <= 45 and steady.now < 10.0, "nothing is left to learn"


def test_it_stays_within_the_nodes_room():
    machine = Machine()
    calibrate(machine, StepCosts(), Room(range(10), 16, 64, 4, 100), 5.0, machine.clock)
    for rows in machine.steps:
        used = [block for row in rows for block in row.block_ids]
        assert len(set(used)) == len(used) and max(used, default=0) < 10
        assert sum(len(row.token_ids) for row in rows) <= 64 and len(rows) <= 4
        assert all(row.start + len(row.token_ids) <= 100 for row in rows)


def test_a_step_that_would_take_too_long_is_left_out():
    machine, costs = Machine(), StepCosts()
    calibrate(machine, costs, replace(ROOM, longest_s=0.05), 60.0, machine.clock)
    sizes = {len(rows[0].token_ids) for rows in machine.steps}
    assert {16, 64, 32} <= sizes and max(sizes) < 256


def test_it_ends_with_its_step_when_the_node_has_work():
    for moment in range(12):
        machine, costs = Machine(), StepCosts()
        measured = calibrate(machine, costs, ROOM, 5.0, machine.clock, lambda m=machine, n=moment: len(m.steps) >= n)
        assert len(machine.steps) == moment and measured == moment // 2


async def test_nobody_is_given_a_block_that_calibration_writes_to():
    """A decode node that joins under load is asked for blocks as soon as its engine is there: what lay in them before
    the last calibration step was lost, and the streams went on with other tokens."""
    pool, free = BlockPool(64, LRU()), []

    async def steps(work) -> int:
        free.append(pool.num_free)
        return work()

    engine = SimpleNamespace(
        beyond=None,
        _config=Config(calibration_ms=0, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4, block_size=16),
        pool=pool, costs=StepCosts(), worker=SimpleNamespace(runner=Machine(), in_thread=steps),
        service=SimpleNamespace(blocks_freed=lambda: free.append(pool.num_free)),
    )  # fmt: skip
    assert await Engine.calibrate(engine, "") == 0
    assert free == [0, 64] and pool.allocate(2) == [0, 1]
    pool.check_integrity()


def test_the_residual_shows_a_machine_that_became_slow():
    machine, costs = Machine(), StepCosts()
    calibrate(machine, costs, ROOM, 5.0, machine.clock)
    assert costs.residual == 1.0
    request = SimpleNamespace(part=None)
    rows = [ScheduledRow(request, 63, 1, samples=True) for _ in range(4)]
    for _ in range(RESIDUAL_STEPS):
        costs.observe(Step(rows), 3 * costs.decode.estimate(4, 256))
    assert costs.residual > 1.5


def test_estimates_know_the_time_in_which_a_pass_reads_weights():
    """Of prompts, of decodes and of both in one step, before and after steps; and they follow the disk."""
    disk, costs, machine = [0.2], StepCosts(), Machine()
    costs.take_least(lambda: disk[0])
    assert costs.prefill.estimate(10) >= 0.2 and costs.prefill.estimate(10, chunks=4) >= 0.8
    assert costs.decode.estimate(1, 10) >= 0.2 and costs.mixed.estimate(1, 10, 16, 0) >= 0.2
    calibrate(machine, costs, ROOM, 5.0, machine.clock)
    assert costs.decode.estimate(1, 10) >= 0.2 and costs.prompt_coefficients[0] >= 0.2
    disk[0] = 0.4
    request = SimpleNamespace(part=None, apart=False)
    rows = [ScheduledRow(request, 100, 1, True)]
    costs.observe(SimpleNamespace(rows=rows, has_parts=False), 0.4)
    assert costs.decode.estimate(1, 10) >= 0.4 and costs.mixed.estimate(1, 10, 16, 0) >= 0.4
