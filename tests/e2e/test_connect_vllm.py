"""The connector's two halves, without vLLM, on three real store nodes: blocks of one engine reach another's memory."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch

from connect.vllm.layout import NotSupported
from connect.vllm.loading import LayerGate
from connect.vllm.options import Options
from connect.vllm.planner import Row
from connect.vllm.pool import Pool
from connect.vllm.scheduling import Scheduling
from connect.vllm.work import Load, Save, StepWork
from connect.vllm.worker import Worker

BLOCKS, LAYERS = 24, 5
SIZE = 16
NAMES = [f"layer.{i}" for i in range(LAYERS)]
ROOT = b"root of tests 16"


@pytest.fixture(scope="module")
def pool(start):
    with start("store=3", "--model", "none", "--value-bytes", "64K", "--dram-bytes", "64M") as cluster:
        yield cluster


class Engine:
    """The memory and the steps of an engine, and the connector's half in its worker."""

    def __init__(self, pool, fill=False, **options):
        shape = (LAYERS, BLOCKS, 2, SIZE, 128)
        self.kv = torch.randint(-100, 100, shape, dtype=torch.int8) if fill else torch.zeros(shape, dtype=torch.int8)
        self.pool = Pool(pool["store-0"].url.removeprefix("http://"))
        self.worker = Worker(self.pool, Options(**options), 0, 1)
        self.worker.attach(dict(zip(NAMES, self.kv, strict=True)))

    def step(self, work, check=None):
        """As vLLM makes a step; `check(layer)` runs when the layer may be read."""
        self.worker.begin(work)
        for i, name in enumerate(NAMES):
            self.worker.layer_ready(name)
            if check is not None:
                check(i)
            self.worker.layer_done(name)
        self.worker.end(work)
        return self.worker.take_ended()

    def until_saved(self, keys, count=None):
        deadline = time.monotonic() + 20
        while self.pool.find(keys, 1).result().blocks < (len(keys) if count is None else count):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def until_ended(self, request_id):
        deadline = time.monotonic() + 30
        failed = set()
        while True:
            ended, more = self.worker.take_ended()
            failed |= more
            if request_id in ended:
                return failed
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self):
        self.worker.close()
        self.worker.close()


@pytest.fixture
def engines(pool):
    made = []

    def make(**options):
        made.append(Engine(pool, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def new_keys(count):
    return [random.randbytes(16) for _ in range(count)]


def test_layer_by_layer_and_between_steps(engines):
    one, other = engines(fill=True), engines()
    keys, there = new_keys(10), list(range(3, 13))
    assert one.step(StepWork(saves=[Save(keys[:4], there[:4], 0), Save(keys[4:], there[4:], 4)])) == (set(), set())
    one.kv_before = one.kv.clone()
    one.kv.zero_()  # the engine may use its blocks for something else at once
    one.until_saved(keys)
    here = random.sample(range(BLOCKS), 10)

    def check(layer):
        assert torch.equal(other.kv[layer, here], one.kv_before[layer, there])

    assert other.step(StepWork(loads=[Load("a", keys, here, background=False)]), check) == (set(), set())
    rest = sorted(set(range(BLOCKS)) - set(here))
    assert not other.kv[:, rest].any()
    assert other.step(StepWork(loads=[Load("b", keys, rest[:10], background=True)]))[1] == set()
    assert other.until_ended("b") == set()
    assert torch.equal(other.kv[:, rest[:10]], one.kv_before[:, there])
    counts = other.worker.take_counts()
    assert (counts["loads"], counts["loads_by_layer"], counts["load_blocks"]) == (2, 1, 20)
    assert counts["load_bytes"] == 20 * LAYERS * 2 * SIZE * 128
    saved = one.worker.take_counts()
    assert (saved["saved_blocks"], saved["saved_bytes"]) == (10, 10 * LAYERS * 2 * SIZE * 128)
    assert not other.worker.take_counts()


def test_layers_that_the_engine_does_not_report_are_saved_too(engines):
    one = engines(fill=True)
    (key,) = new_keys(1)
    work = StepWork(saves=[Save([key], [2], 0)])
    one.worker.begin(work)
    one.worker.layer_done(NAMES[1])
    one.worker.end(work)
    one.until_saved([key])
    before = one.kv[:, 2].clone()
    one.step(StepWork(loads=[Load("a", [key], [7], background=False)]))
    assert torch.equal(one.kv[:, 7], before)


def test_what_is_computed_on_missing_blocks_is_not_saved(engines):
    """Until the scheduler knows of the failure: it plans steps ahead."""
    one = engines(fill=True)
    keys, bad = new_keys(3), new_keys(4)
    one.step(StepWork(saves=[Save(keys, [0, 1, 2], 0)]))
    one.until_saved(keys)
    before = one.kv[:, :3].clone()
    mixed = Load("a", [keys[0], bad[0], keys[2]], [5, 6, 7], background=False)
    assert one.step(StepWork(loads=[mixed], saves=[Save([bad[1]], [8], 3)])) == (set(), {6})
    assert torch.equal(one.kv[:, [5, 7]], before[:, [0, 2]])
    assert one.step(StepWork(saves=[Save([bad[2]], [9], 4)], failures_known=0)) == (set(), set())
    one.step(StepWork(saves=[Save([bad[3]], [9], 4)], failures_known=1))
    one.until_saved([bad[3]])
    assert [one.pool.find([key], 1).result().blocks for key in bad] == [0, 0, 0, 1]
    counts = one.worker.take_counts()
    assert (counts["save_blocks_discarded"], counts["loads_failed"], counts["load_blocks_failed"]) == (2, 1, 1)


def test_a_full_staging_memory_drops_blocks_and_gives_its_slots_back(engines):
    one = engines(fill=True, staging_bytes=128 << 10)  # two slots
    keys = new_keys(5)
    one.step(StepWork(saves=[Save(keys, [0, 1, 2, 3, 4], 0)]))
    one.until_saved(keys[:2])
    assert one.pool.find(keys[2:], 1).result().blocks == 0
    while one.worker._saving.free_slots < 2:
        time.sleep(0.01)
    one.step(StepWork(saves=[Save(keys[2:], [2, 3, 4], 2)]))
    one.until_saved(keys[:4])
    assert one.worker.take_counts()["save_blocks_dropped"] == 4


def test_a_producer_waits_for_staging_memory(engines):
    one = engines(fill=True, staging_bytes=64 << 10, role="kv_producer")
    keys = new_keys(3)
    for i, key in enumerate(keys):
        one.step(StepWork(saves=[Save([key], [i], i)]))
    one.until_saved(keys)


def test_nothing_is_saved_with_that_option(engines):
    one = engines(save="none")
    (key,) = new_keys(1)
    one.step(StepWork(saves=[Save([key], [0], 0)]))
    assert one.pool.find([key], 1).result().blocks == 0


def test_a_slot_that_is_too_small_is_refused(pool):
    mine = Pool(pool["store-0"].url.removeprefix("http://"))
    whole = torch.zeros(LAYERS, 2, 20000, dtype=torch.int8)
    with pytest.raises(NotSupported, match="--value-bytes 100000"):
        Worker(mine, Options(), 0, 1).attach(dict(zip(NAMES, whole, strict=True)))
    mine.close()


def test_the_scheduler_finds_what_a_worker_saved(pool, engines):
    one = engines(fill=True)
    half = Scheduling(Pool(pool["store-1"].url.removeprefix("http://")), ROOT, SIZE, Options(), 1)
    tokens = [random.randrange(1000) for _ in range(5 * SIZE + 3)]

    def match(name):
        while (found := half.match(name, 0)).tokens is None:
            pass
        return found.tokens

    half.arrived("a", tokens, "", 0)
    assert match("a") == 0
    half.allocated("a", list(range(6)), 0)
    work = half.step([Row("a", 0, len(tokens), list(range(6)))])
    one.step(work)
    one.until_saved(work.saves[0].keys)
    assert half.finished("a") == 5
    half.arrived("b", tokens, "", 0)
    assert match("b") == 5 * SIZE
    half.arrived("c", tokens, "another salt", 0)
    assert match("c") == 0
    half.reset()
    half.arrived("d", tokens, "", 0)
    assert match("d") == 0
    assert half.take_counts()["lookups"] >= 4
    half.close()


def test_a_gate_opens_layer_by_layer():
    gate, passed = LayerGate(3), []

    def through():
        for layer in range(3):
            gate.wait(layer)
            passed.append(layer)

    thread = threading.Thread(target=through)
    thread.start()
    for layer in range(2):
        gate.land(layer)
        while len(passed) <= layer:
            time.sleep(0.001)
        assert passed == list(range(layer + 1))
    gate.end()  # a load that fails ends early
    thread.join(10)
    assert passed == [0, 1, 2]


def test_a_lost_node_costs_its_blocks_and_nothing_hangs(pool, engines):
    """The last test of the module."""
    one, other = engines(fill=True), engines()
    keys = new_keys(20)
    one.step(StepWork(saves=[Save(keys, list(range(20)), 0)]))
    one.until_saved(keys)
    os.kill(pool["store-2"].pid, signal.SIGKILL)
    other.step(StepWork(loads=[Load("a", keys, list(range(20)), background=True)]))
    failed = other.until_ended("a")
    arrived = sorted(set(range(20)) - failed)
    assert failed and arrived
    assert torch.equal(other.kv[:, arrived], one.kv[:, arrived])
    ended, gone = other.step(StepWork(loads=[Load("b", keys, list(range(20)), background=False)]))
    assert (ended, gone) == (set(), failed)
