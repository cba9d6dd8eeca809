"""Steps of a simulated node against those of the engine's batcher: the same arrivals, step times and policies.

With blocks of one token the steps are the same ones. Larger blocks move the ends of the engine's chunks to their
borders, and the memory of a request to whole blocks; then the results are equal within the bounds below.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher, BatchRules
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from engine.step.step import Step
from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.costs import ExactChunks
from lab.simulator.models.step_models import StepModel
from sched.batching import Tuning, batching_policies
from sched.classes import CLASSES
from sched.queueing import queue_orders

BLOCK = 16
BUDGET = 512
MODEL = StepModel(
    name="both", prefill=(2e-3, 1e-4, 2e-9), decode=(8e-3, 1e-4, 2e-3, 0.0, 2e-7), token_bytes=1, kv_tokens=200_000,
    chunk_tokens=BUDGET, nic_bytes_s=1e12, nic_latency_s=1e-9,
)  # fmt: skip
CHUNK, TBT_S = 128, 0.03


@dataclass
class Played:
    """Of one run: (prompt tokens, decodes) of each step with prompts; by request, seconds until its first token and its
    end; and what its arena found and evicted."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)  # tokens of its prefix when it started first
    evicted: int = 0

    def order(self) -> list[int]:
        return sorted(self.ended, key=lambda number: (round(self.ended[number], 9), number))


def load(seed: int, count: int, rate_s: float) -> list[TraceRow]:
    """Poisson arrivals; prompts of some hundred tokens with a long tail, answers of some dozens."""
    rng, at, rows = Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate_s)
        prompt, answer = min(2500, round(rng.lognormvariate(5.5, 1.0)) + 2), round(rng.lognormvariate(3.5, 0.8)) + 1
        rows.append(TraceRow(1000 * at, prompt, answer, [10_000 * number + k for k in range(-(-prompt // 512))]))
    return rows


def production(
    rows: list[TraceRow], model: StepModel, batching: str, order: str, block: int, prefixes: bool = False
) -> Played:
    """The engine's batcher; nothing else of a node. prefixes: it finds those in its arena, with blocks of the trace."""
    policy = batching_policies[batching](Tuning(CHUNK, TBT_S, ExactChunks(model), CLASSES))
    rules = BatchRules(prefix_caching=prefixes, policy=policy, order=queue_orders[order](CLASSES))
    pool = BlockPool(model.kv_tokens // block)
    batcher = Batcher(pool, block, model.max_batch, BUDGET, 10**6, {-1}, rules)
    coming = [(row.timestamp_ms / 1000, number, row) for number, row in enumerate(rows)][::-1]
    played, now = Played(), 0.0

    def arrive(until: float) -> None:
        while coming and coming[-1][0] <= until:
            at, number, row = coming.pop()
            params = SamplingParams(temperature=0, max_tokens=row.output_length, ignore_eos=True)
            ids = [block * id + k for id in row.hash_ids for k in range(block)] if prefixes else [1] * row.input_length
            ids = ids[: row.input_length]
            batcher.add(at, Request(str(number), ids, len(ids), params, at, b"root" * 4))

    while coming or batcher.requests:
        arrive(now)
        for request in batcher.loads(now, len(rows)):  # as engine/handoff/reuse.py, where nobody else has anything
            batcher.blocks.adopt_prefix(request)
            batcher.loaded(now, request)
        step = batcher.schedule(now)
        if step is None:
            now = coming[-1][0]
            continue
        now += seconds(step, model, played)
        arrive(now)
        for row in step.rows:
            played.found.setdefault(int(row.request.request_id), row.request.num_cached)
        for request, _, _ in batcher.commit(now, step, [(1,) if row.samples else None for row in step.rows]).emitted:
            number = int(request.request_id)
            played.first.setdefault(number, now)
            if request.finished:
                played.ended[number] = now
    batcher.check_integrity()
    played.evicted = pool.num_evictions
    return played


def seconds(step: Step, model: StepModel, into: Played) -> float:
    decodes = [row for row in step.rows if row.num_tokens == 1 and row.request.num_output_tokens]
    chunks = [(row.num_tokens, row.start) for row in step.rows if row not in decodes]
    context = sum(row.start + row.num_tokens for row in decodes)
    if not chunks:
        return model.decode_s(len(decodes), context)
    into.steps.append((sum(tokens for tokens, _ in chunks), len(decodes)))
    return model.mixed_s(chunks, len(decodes), context) if decodes else model.chunks_s(chunks)


class Recorder:
    """The step model of a simulated node; it notes the steps with prompts."""

    def __init__(self, model: StepModel, into: Played) -> None:
        self._model, self._into = model, into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def mixed_s(self, chunks, batch, context):
        self._into.steps.append((sum(tokens for tokens, _ in chunks), batch))
        return self._model.mixed_s(chunks, batch, context)

    def chunks_s(self, chunks):
        self._into.steps.append((sum(tokens for tokens, _ in chunks), 0))
        return self._model.chunks_s(chunks)


def simulated(rows: list[TraceRow], model: StepModel, batching: str, order: str, **change: Any) -> Played:
    config = SimConfig(
        prefill=0, decode=0, mixed=1, batching_policy=batching, queue_order=order, prefill_chunk_tokens=CHUNK,
        tbt_budget_s=TBT_S, step_prompts=10**6, step_models="exact", step_noise=0.0, cache_blocks=0, probe_s=0.0,
    )  # fmt: skip
    cluster, played = Cluster(replace(config, **change), model), Played()
    cluster.nodes[0].model = Recorder(model, played)
    cluster.played(rows)
    played.first = {job.index: job.first_token for job in cluster.jobs}
    played.ended = {job.index: job.finished for job in cluster.jobs}
    played.found = {job.index: job.prefix_tokens for job in cluster.jobs}
    played.evicted = cluster.nodes[0].arena.evicted
    return played


def ttfts(rows: list[TraceRow], played: Played) -> list[float]:
    return [played.first[number] - row.timestamp_ms / 1000 for number, row in enumerate(rows)]


BATCHING = ("decode-first", "mixed", "dynamic", "prefill-first")
ORDERS = ("fcfs", "srpt")
SEATS = {"many seats": MODEL, "few seats": replace(MODEL, max_batch=8)}


def both(seed: int, model: StepModel, batching: str, order: str, block: int) -> tuple[list[TraceRow], Played, Played]:
    """(the requests, the engine's batcher, the simulator)"""
    rows = load(seed, 60, 12.0)
    return rows, production(rows, model, batching, order, block), simulated(rows, model, batching, order)


def shifts(real: Played, sim: Played) -> int:
    """The most places by which a request ends earlier or later in the order."""
    places = {number: place for place, number in enumerate(sim.order())}
    return max(abs(place - places[number]) for place, number in enumerate(real.order()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("seats", SEATS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_simulator_takes_the_steps_of_the_engine(seed, seats, batching, order):
    """Every step with prompts has the same tokens and decodes; every request its first and last token at the same time.
    Not for a prompt of which one token is left: the engine computes that beside the chunk, like a decode."""
    rows, real, sim = both(seed, SEATS[seats], batching, order, 1)
    assert sim.steps == real.steps and len(real.steps) > 50
    assert ttfts(rows, sim) == pytest.approx(ttfts(rows, real), rel=1e-9)
    assert sim.ended == pytest.approx(real.ended, rel=1e-9) and shifts(real, sim) == 0
    assert any(decodes for _, decodes in real.steps) != (batching == "prefill-first")


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("seats", SEATS)
def test_blocks_of_sixteen_tokens_change_little(seats, batching):
    """Mean TTFT within 5 %, the end of all requests within 0.5 %, steps within 5, three places in the order."""
    rows, real, sim = both(3, SEATS[seats], batching, "fcfs", BLOCK)
    assert sum(tokens for tokens, _ in sim.steps) == sum(tokens for tokens, _ in real.steps)
    assert abs(len(sim.steps) - len(real.steps)) <= 5 and shifts(real, sim) <= 3
    assert sum(ttfts(rows, sim)) == pytest.approx(sum(ttfts(rows, real)), rel=0.05)
    assert max(sim.ended.values()) == pytest.approx(max(real.ended.values()), rel=5e-3)


@pytest.mark.parametrize("batching", BATCHING)
def test_too_little_memory_costs_about_the_same(batching):
    """Requests lose their KV and compute it again: over four loads, mean TTFT within 10 % and computed prompt tokens
    within 5 %. Without the rule that prompts wait for memory and seats, TTFT was a third of the engine's."""
    waits, tokens, least = [0.0, 0.0], [0, 0], 0
    for seed in range(4):
        rows, *played = both(seed, replace(MODEL, kv_tokens=3200), batching, "fcfs", BLOCK)
        least += sum(row.input_length for row in rows)
        for which, one in enumerate(played):
            waits[which] += sum(ttfts(rows, one))
            tokens[which] += sum(count for count, _ in one.steps)
    assert tokens[0] > 1.01 * least, "no request lost its KV: this load shows nothing"
    assert waits[1] == pytest.approx(waits[0], rel=0.1) and tokens[1] == pytest.approx(tokens[0], rel=0.05)


def turns(seed: int, count: int, rate_s: float) -> list[TraceRow]:
    """Turns of twelve chats behind one system prompt, in blocks of BLOCK tokens; a chat begins again after six."""
    rng, at, rows = Random(seed), 0.0, []
    last = [(number, 0) for number in range(12)]
    for _ in range(count):
        at += rng.expovariate(rate_s)
        chat = rng.randrange(12)
        number, turn = last[chat]
        last[chat] = (number, turn + 1) if turn < 5 else (number + 12, 0)
        blocks = [*range(6), *(1000 * (1 + number) + k for k in range(4 + 5 * turn))]
        prompt, answer = BLOCK * len(blocks) - rng.randrange(BLOCK), round(rng.lognormvariate(3.0, 0.6)) + 1
        rows.append(TraceRow(1000 * at, prompt, answer, blocks))
    return rows


ROOM = {"no evictions": 200_000, "half of the chats": 3200, "few requests": 1200}


@pytest.mark.parametrize("pool_model", ["real", "fast"])
@pytest.mark.parametrize("room", ROOM)
def test_a_node_finds_the_prefixes_that_the_engine_finds(room, pool_model):
    """On the same trace, in an arena of the same size, which running requests and kept prefixes share."""
    rows, model = turns(5, 240, 6.0), replace(MODEL, kv_tokens=ROOM[room])
    real = production(rows, model, "decode-first", "fcfs", BLOCK, prefixes=True)
    sim = simulated(rows, model, "decode-first", "fcfs", cache_blocks=10**6, block_tokens=BLOCK, pool_model=pool_model)
    shares = [sum(one.found.values()) / sum(row.input_length for row in rows) for one in (real, sim)]
    assert (real.evicted > 0) == (sim.evicted > 0) == (room != "no evictions")
    assert shares[1] == pytest.approx(shares[0], abs=0.01)
