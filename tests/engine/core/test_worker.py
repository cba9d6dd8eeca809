"""The engine loop with a runner that computes nothing: what overlaps, what fails, what an abort leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher, BatchRules
from engine.core.costs import StepCosts
from engine.core.emissions import Emission
from engine.core.prefix_loads import MAX_LOADS_IN_FLIGHT
from engine.core.served import TOKENS
from engine.core.worker import Reuse, Worker
from engine.handoff.reuse import Publisher
from engine.model.experts.losses import Loss
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampled
from engine.step.cold import Cold
from engine.step.request import Request, RequestState
from net.errors import RemoteError
from net.metrics.events import Metrics
from sched.batching import DecodeFirst
from sched.queueing import EDF

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")
ROOT = root_key("toy", GEOMETRY)


class Counting:
    """A runner that samples 100, 101, ... and tells when a step begins."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []  # per step: the starts of its rows
        self.tables: list[list[list[int]]] = []
        self.beginning = threading.Condition()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.losses: dict[int, Loss] = {}
        self.ahead: dict[int, Any] = {}
        self.next_losses: dict[int, Loss] = {}  # of the next step alone

    def step(self, rows: Any, on_layer: Any = None, before_layer: Any = None) -> list[list[Sampled]]:
        with self.beginning:
            self.begun.append([row.start for row in rows])
            self.tables.append([list(row.block_ids) for row in rows])
            self.beginning.notify_all()
        assert self.gate.wait(5)
        self.losses, self.next_losses = self.next_losses, {}
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return [[Sampled(100 + len(self.begun))] if row.sample else [] for row in rows]

    def wait_for_step(self, number: int) -> bool:
        with self.beginning:
            return self.beginning.wait_for(lambda: len(self.begun) >= number, 5)


class NoPrefix:
    async def load(self, request: Request) -> None:
        pass


def make(num_blocks: int = 64, runner: Counting | None = None) -> tuple[Worker, Counting]:
    pool, metrics, runner = BlockPool(num_blocks), Metrics("m", "n"), runner or Counting()
    batcher = Batcher(pool, 4, 4, 64, 1000, {0}, BatchRules(True, DecodeFirst(), EDF()))
    publisher = Publisher(pool, None, metrics)
    return Worker(batcher, runner, Reuse(NoPrefix(), publisher), StepCosts(), metrics), runner  # type: ignore[arg-type]


def request(name: str, prompt: int = 5, max_tokens: int = 4, token: int = 1) -> Request:
    return Request(name, [token] * prompt, prompt, SamplingParams(temperature=0, max_tokens=max_tokens), 0.0, ROOT)


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - conditions in many places
            await asyncio.sleep(0.001)


async def test_the_next_step_starts_before_the_tokens_of_the_last_are_handed_out():
    worker, runner = make()
    got: list[Emission] = []

    def on_emissions(emissions):
        if not emissions[0].request.finished:
            assert runner.wait_for_step(len(got) + 2), "the engine thread waits for the hand-out"
        got.extend(emissions)

    worker.start(on_emissions)
    worker.add(request("r"))
    await until(lambda: len(got) == 4)
    assert [e.token_id for e in got] == [101, 102, 103, 104]
    assert runner.begun == [[0], [5], [6], [7]]
    assert runner.tables == [[[0, 1]]] * 4
    await worker.close()
    worker.batcher.check_integrity()
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}


async def test_the_next_step_starts_before_the_time_of_the_last_is_learned(monkeypatch):
    """Learning may fit a model again, for which the engine thread does not wait."""
    worker, runner = make()
    learned: list[int] = []
    observe = worker.costs.observe

    def learn(step, seconds):
        assert len(learned) == 3 or runner.wait_for_step(len(learned) + 2), "the engine thread waits for the fit"
        learned.append(step.num_tokens)
        observe(step, seconds)

    monkeypatch.setattr(worker.costs, "observe", learn)
    got: list[Emission] = []
    worker.start(got.extend)
    worker.add(request("r"))
    await until(lambda: len(got) == 4)
    assert learned == [5, 1, 1, 1], "every step, and that of the last token too"
    costs = worker.costs
    assert (costs.prefill.regression.observations, costs.decode.regression.observations) == (1, 3)
    await worker.close()


async def test_the_estimates_learn_from_every_prompt_and_token():
    worker, _ = make()
    got: list[Emission] = []
    worker.start(got.extend)
    tokens = 2 + 2 * TOKENS
    worker.add(request("r", prompt=9, max_tokens=tokens))
    await until(lambda: len(got) == tokens)
    served = worker.costs.served
    assert (served.first.observations, served.next.observations) == (1, 2), "the first decode step follows no other"
    await worker.close()


async def test_a_prompt_that_comes_during_a_step_is_in_the_next_one():
    """Its prefix is looked up while the step runs, and so are those behind it for which no lookup was left."""
    worker, runner = make()
    worker.start(lambda emissions: None)
    runner.gate.clear()
    worker.add(request("first"))
    assert await asyncio.to_thread(runner.wait_for_step, 1)
    others = [request(f"r{i}", token=2 + i) for i in range(MAX_LOADS_IN_FLIGHT + 1)]
    for other in others:
        worker.add(other)
    await until(lambda: all(other.looked_up and other.state is RequestState.WAITING for other in others))
    assert len(runner.begun) == 1
    runner.gate.set()
    assert await asyncio.to_thread(runner.wait_for_step, 2)
    assert runner.begun[1] == [5, 0, 0, 0], "as many as there are seats"
    await worker.close()


class Layered(Counting):
    """Its steps have three layers, and wait for `gate` between the first two."""

    can_begin_again = True

    def step(self, rows: Any, on_layer: Any = None, before_layer: Any = None) -> list[list[Sampled]]:
        if before_layer is not None:
            before_layer(0)
        chosen = super().step(rows)
        for layer in (1, 2):
            if before_layer is not None:
                before_layer(layer)
        return chosen


async def two_classes(worker: Worker) -> tuple[Request, Request]:
    """A prompt of class batch and one of class interactive. Steps give way where such a one was before."""
    before, batch, chat = request("before", 5, 1, token=3), request("batch", 9, 2), request("chat", 5, 1, token=2)
    before.service_class, batch.service_class, chat.service_class = "interactive", "batch", "interactive"
    worker.add(before)
    await until(lambda: before.finished)
    return batch, chat


async def test_a_step_of_class_batch_ends_for_a_prompt_that_comes():
    worker, runner = make(runner=Layered())
    got: list[tuple[str, int]] = []
    worker.start(lambda emissions: got.extend((e.request.request_id, e.token_id) for e in emissions))
    batch, chat = await two_classes(worker)
    runner.gate.clear()
    worker.add(batch)
    assert await asyncio.to_thread(runner.wait_for_step, 2)
    learned = worker.costs.prefill.regression.observations
    worker.add(chat)
    await until(lambda: chat.looked_up and chat.state is RequestState.WAITING)
    runner.gate.set()
    await until(lambda: len(got) == 4)
    assert runner.begun == [[0], [0], [0], [0], [9]], "batch's prompt twice: nobody came during the second time"
    assert got == [("before", 101), ("chat", 103), ("batch", 104), ("batch", 105)]
    assert worker.costs.prefill.regression.observations == learned + 2, "of two steps that ended"
    lost = next(entry for entry in batch.journal.drain(0.0) if entry[1] == "computed")[2]
    assert lost["others_s"] > 0
    await worker.close()
    worker.batcher.check_integrity()
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}


async def test_decodes_of_class_batch_end_for_a_hand_over():
    """It decodes in the next step, and they come after it: their tokens are those of the second time."""
    worker, runner = make(runner=Layered())
    got: list[tuple[str, int]] = []
    worker.start(lambda emissions: got.extend((e.request.request_id, e.token_id) for e in emissions))
    batch, chat = request("batch", 5, 30), request("chat", 5, 2, token=2)
    batch.service_class, chat.service_class = "batch", "interactive"
    worker.batcher.reserve(0.0, chat)
    worker.add(batch)
    await until(lambda: got)
    runner.gate.clear()
    ran = len(runner.begun)
    assert await asyncio.to_thread(runner.wait_for_step, ran + 1)
    worker.batcher.arrived(time.monotonic(), chat, 7)
    worker.wake()
    runner.gate.set()
    await until(lambda: batch.finished and chat.finished)
    tokens = {name: [token for one, token in got if one == name] for name in ("batch", "chat")}
    assert len(tokens["batch"]) == 30 and len(tokens["chat"]) == 1
    assert sum(len(starts) for starts in runner.begun) > sum(map(len, tokens.values())), "a row was computed twice"
    assert [r for r in (batch, chat) if r.num_output_tokens != r.sampling.max_tokens] == []
    await worker.close()
    worker.batcher.check_integrity()
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}


async def test_an_abort_in_a_step_that_gives_way_frees_the_blocks():
    worker, runner = make(runner=Layered())
    worker.start(lambda emissions: None)
    batch, chat = await two_classes(worker)
    runner.gate.clear()
    worker.add(batch)
    assert await asyncio.to_thread(runner.wait_for_step, 2)
    worker.add(chat)
    await until(lambda: chat.looked_up and chat.state is RequestState.WAITING)
    worker.abort("batch")
    assert worker.batcher.pool.references()["request"] > 0, "the step still writes there"
    runner.gate.set()
    await until(lambda: chat.finished)
    await until(lambda: worker.batcher.pool.references()["request"] == 0)
    await worker.close()
    worker.batcher.check_integrity()


async def test_a_wake_while_tokens_are_handed_out_is_not_lost():
    """The last step of one request hands out; its consumer queues the next request at that very moment."""
    worker, _ = make()
    got: list[str] = []

    def on_emissions(emissions):
        got.extend(e.request.request_id for e in emissions)
        if len(got) < 50:
            worker.add(request(f"r{len(got)}", max_tokens=1))

    worker.start(on_emissions)
    worker.add(request("r0", max_tokens=1))
    await until(lambda: len(got) == 50)
    assert got == [f"r{i}" for i in range(50)]
    await worker.close()


async def test_an_abort_during_a_step_keeps_the_blocks_until_its_end():
    worker, runner = make()
    got: list[Emission] = []
    runner.gate.clear()
    worker.start(got.extend)
    worker.add(request("gone"))
    worker.add(request("stays", token=2))
    await until(lambda: runner.begun)
    worker.abort("gone")
    assert worker.batcher.pool.usage()["held"] == 4
    runner.gate.set()
    await until(lambda: len(got) == 4)
    assert {e.request.request_id for e in got} == {"stays"}
    await worker.close()
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}


@pytest.mark.expects_error("a step of 2 requests failed")
async def test_a_failing_step_ends_its_requests_and_nobody_elses():
    worker, runner = make()
    got: list[Emission] = []
    runner.error = RuntimeError("broken")
    worker.start(got.extend)
    worker.add(request("a"))
    worker.add(request("b", token=2))
    await until(lambda: len(got) == 2)
    assert [(e.request.request_id, e.token_id, e.error) for e in got] == [
        ("a", None, "RuntimeError: broken"),
        ("b", None, "RuntimeError: broken"),
    ]
    worker.add(request("c"))
    await until(lambda: len(got) == 6)
    assert [e.error for e in got[2:]] == [None] * 4
    await worker.close()
    worker.batcher.check_integrity()
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}


class BrokenTier:
    async def load(self, request: Request) -> None:
        raise OSError("the disk fails")


@pytest.mark.expects_error("the prefix load of r failed")
async def test_a_request_beyond_memory_without_a_room_ends():
    pool, metrics, runner = BlockPool(64), Metrics("m", "n"), Counting()
    batcher = Batcher(pool, 4, 4, 64, 1000, {0}, BatchRules(True, DecodeFirst(), EDF()))
    reuse = Reuse(BrokenTier(), Publisher(pool, None, metrics))
    worker = Worker(batcher, runner, reuse, StepCosts(), metrics)  # type: ignore[arg-type]
    got: list[Emission] = []
    worker.start(got.extend)
    one = request("r")
    batcher.goes_beyond(one, Cold(4, 1, 4, 2))
    worker.add(one)
    await until(lambda: got)
    assert got[0].error == "its room could not be found" and one.finished and not runner.begun
    await worker.close()


async def test_preempted_requests_start_over_with_their_new_blocks():
    """Room for one and a half requests: the newer one gives its blocks back; its table follows."""
    worker, runner = make(num_blocks=8)
    got: list[Emission] = []
    worker.start(got.extend)
    lists: list[list[int]] = []
    step = worker.batcher.schedule

    def schedule(now):
        planned = step(now)
        if planned:
            lists.append([list(row.request.block_ids) for row in planned.rows])
        return planned

    worker.batcher.schedule = schedule
    for i, name in enumerate("abc"):
        one = request(name, prompt=6 + i, max_tokens=15)
        one.token_ids = [10 * i + 1 + j for j in range(6 + i)]
        one.arrival = float(i)
        worker.add(one)
    await until(lambda: sum(e.request.finished for e in got[-3:]) and len(got) == 45)
    assert worker.batcher.num_preemptions > 0
    assert runner.tables == lists
    await worker.close()
    worker.batcher.check_integrity()


async def test_a_step_runs_the_model_once_for_each_of_the_weights():
    """Rows keep their order, whatever weights they use; other weights are refused."""
    worker, old = make()
    new, other = Counting(), b"n" * 16
    got: list[Emission] = []
    old.gate.clear()
    worker.start(got.extend)
    worker.add(request("old"))
    await until(lambda: old.begun)
    with pytest.raises(RemoteError, match="does not serve weights 6e6e"):
        worker.add(_with(request("early", token=2), other))
    worker.weights.add(other, new)  # type: ignore[arg-type]
    worker.weights.switch(0.0, other)
    worker.add(_with(request("new", token=2), other))
    with pytest.raises(RemoteError, match="does not serve weights of the start"):
        worker.add(request("late", token=3))
    assert worker.uses(b"") and worker.uses(other) and not worker.uses(b"x")
    old.gate.set()
    await until(lambda: len(got) == 8)
    assert [e.token_id for e in got if e.request.request_id == "old"] == [101, 102, 103, 104]
    assert [e.token_id for e in got if e.request.request_id == "new"] == [101, 102, 103, 104]
    assert old.begun == [[0], [5], [6], [7]] and new.begun == [[0], [5], [6], [7]]
    observed = worker.costs.decode.regression.observations
    assert observed <= 3, "the time of a step with two models predicts no other"
    await until(lambda: not worker.uses(b""))
    assert worker.weights.drop(b"") is old
    await worker.close()
    worker.batcher.check_integrity()


def _with(one: Request, weights: bytes) -> Request:
    one.weights = weights
    return one


async def test_a_request_that_lost_its_experts_ends_and_the_others_go_on():
    worker, runner = make()
    got: list[Emission] = []
    runner.next_losses = {0: Loss(3, (1,), fails=True)}
    runner.gate.clear()
    worker.start(got.extend)
    worker.add(request("lost"))
    worker.add(request("stays", token=2))
    await until(lambda: runner.begun)
    runner.gate.set()
    await until(lambda: sum(e.request.request_id == "stays" and e.request.finished for e in got))
    (lost,) = [e for e in got if e.request.request_id == "lost"]
    assert "lost with rank 1 of --expert-parallel-size" in lost.error
    assert all(e.error is None for e in got if e.request.request_id == "stays")
    await worker.close()
    worker.batcher.check_integrity()
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}


async def test_a_request_with_fewer_experts_keeps_its_kv_for_itself():
    worker, runner = make()
    got: list[Emission] = []
    runner.next_losses = {0: Loss(3, (1,), fails=False)}
    worker.start(got.extend)
    worker.add(request("short", prompt=9, max_tokens=8))
    await until(lambda: got and got[-1].request.finished)
    assert all(e.error is None for e in got)
    assert worker.batcher.pool.usage()["named"] == 0
    (event, *_) = [one for one in got[-1].request.journal.drain(0.0) if one[1] == "experts_dropped"]
    assert event[2] == {"pairs": 3, "ranks": [1]}
    await worker.close()
