"""A prefix that arrives while the engine computes with it: the same tokens, and nothing kept of one that broke."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool, IntegrityError
from cache.results import LeadingRun
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.core.emissions import Emission
from engine.core.layered_load import LayerGate, hides
from engine.core.worker import Reuse, Worker
from engine.handoff import reuse
from engine.handoff.prefix_sources import PrefixSources, Prices
from engine.handoff.reuse import LoadOptions, PrefixLoader, Publisher
from engine.pooled.pool_blocks import PlainBlocks
from engine.pooled.prefetch import Prefetch
from engine.sampling.params import SamplingParams
from engine.step.request import Request, RequestState
from net.metrics.events import Metrics
from tests.engine.core.test_worker import until
from tests.engine.tiny_llama import BLOCK_SIZE, runner, tiny

GEOMETRY = BlockGeometry(3, 2, 32, BLOCK_SIZE, "float32")
ROOT = root_key("toy", GEOMETRY)
PROMPT = [(7 * i) % 200 + 2 for i in range(5 * BLOCK_SIZE + 6)]
BLOCKS = 24


class SlowStore:
    """Has KV of a prompt's full blocks; a layer comes when it is let go."""

    def __init__(self, kv: Any, target: Any) -> None:
        self.kv, self.target = kv, target  # [blocks, layers, ...], the pool to write to
        self.letting_go = asyncio.Semaphore(0)
        self.sound = True
        self.landed = 0
        self.sources = self.tiers = {}
        self.transports: dict[str, int] = {}

    async def find(self, keys, groups=None):
        count = min(len(keys), len(self.kv))
        return LeadingRun(count, count)

    @asynccontextmanager
    async def pinned(self, keys):
        yield self

    def region(self, name):
        return name

    async def read(self, region, offsets, parts, landed):
        for layer, part in enumerate(parts):
            assert part == (layer * GEOMETRY.layer_bytes, GEOMETRY.layer_bytes)
            await self.letting_go.acquire()
            for i, offset in enumerate(offsets):
                self.target[offset // GEOMETRY.block_bytes, layer] = self.kv[i, layer]
            self.landed += 1
            landed(layer)
        return self.sound


def make(model: Any, kv: Any = None) -> tuple[Worker, SlowStore | None, list[Emission]]:
    ours, pool, metrics, costs = runner(model, num_blocks=BLOCKS), BlockPool(BLOCKS), Metrics("m", "n"), StepCosts()
    batcher = Batcher(pool, BLOCK_SIZE, 4, 64, 1000, {0})
    store: Any = None if kv is None else SlowStore(kv, ours.kv_pool)
    blocks = PlainBlocks(store, "kv", GEOMETRY)
    sources = PrefixSources(store, blocks, None, GEOMETRY, Prices(costs), "always")
    options = LoadOptions(GEOMETRY, Prefetch("wait", 0.0, lambda: False), blocks.layers)
    loader = PrefixLoader(batcher, options, costs, metrics, sources)
    worker = Worker(batcher, ours, Reuse(loader, Publisher(pool, None, metrics)), costs, metrics)
    got: list[Emission] = []
    worker.start(got.extend)
    return worker, store, got


def request(name: str = "r") -> Request:
    return Request(name, list(PROMPT), len(PROMPT), SamplingParams(temperature=0, max_tokens=4), 0.0, ROOT)


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
async def expected(model):
    """(tokens, KV of the full blocks) without a prefix."""
    worker, _, got = make(model)
    r = request()
    worker.add(r)
    await until(lambda: r.block_ids)
    blocks = r.block_ids
    await until(lambda: len(got) == 4)
    kv = worker.runner.kv_pool[blocks[: len(PROMPT) // BLOCK_SIZE]].clone()
    await worker.close()
    return [e.token_id for e in got], kv


def idle(worker: Worker) -> bool:
    worker.batcher.check_integrity()
    worker.batcher.pool.check_transfer_owners(worker.held_blocks())
    worker.batcher.pool.check_request_owners(worker.request_blocks())
    return worker.batcher.pool.references() == {"request": 0, "transfer": 0}


async def test_a_step_waits_for_each_layer_of_the_prefix_and_gives_the_same_tokens(model, expected):
    tokens, kv = expected
    worker, store, got = make(model, kv)
    r = request()
    worker.add(r)
    for layers in range(1, 4):
        await asyncio.sleep(0.05)
        assert not got and store.landed == layers - 1
        assert not worker.batcher.pool.match(r.block_keys(BLOCK_SIZE))  # nobody else may use what is on its way
        if layers == 1:
            assert r.num_computed == 5 * BLOCK_SIZE and worker.batcher.running  # it computes already
        store.letting_go.release()
    await until(lambda: len(got) == 4)
    assert [e.token_id for e in got] == tokens
    assert r.num_cached == 5 * BLOCK_SIZE
    assert len(worker.batcher.pool.match(r.block_keys(BLOCK_SIZE))) == 5
    (fetched,) = [detail for _, event, detail in r.journal.drain(0.0) if event == "prefix_fetched"]
    assert fetched["blocks"] == 5 and len(fetched["intervals"]) == 3
    await worker.close()
    assert idle(worker)


async def test_a_damaged_prefix_ends_the_request_and_is_never_found(model, expected):
    _, kv = expected
    worker, store, got = make(model, kv)
    store.sound = False
    for _ in range(3):
        store.letting_go.release()
    r = request()
    worker.add(r)
    await until(lambda: got)
    assert [(e.token_id, e.error, e.incomplete) for e in got] == [(None, "its prefix arrived incomplete", True)]
    assert not worker.batcher.pool.match(r.block_keys(BLOCK_SIZE))
    assert idle(worker)
    await worker.close()


async def test_a_request_that_may_not_fetch_is_computed(model, expected):
    """Its acceptor asks for this after a damaged prefix."""
    tokens, kv = expected
    worker, store, got = make(model, kv)
    store.sound = False
    for _ in range(3):
        store.letting_go.release()
    r = request()
    r.fetches = False
    worker.add(r)
    await until(lambda: len(got) == 4)
    assert [e.token_id for e in got] == tokens
    assert r.num_cached == store.landed == 0
    await worker.close()
    assert idle(worker)


@pytest.mark.expects_error("could not begin a layered load|prefix load of r failed")
@pytest.mark.parametrize("when", ["asked", "entered"])
async def test_a_store_that_fails_before_a_load_begins_costs_the_load_only(model, expected, when):
    tokens, kv = expected
    worker, store, got = make(model, kv)

    @asynccontextmanager
    async def entered(keys):
        raise ValueError("this test says so")
        yield

    def asked(keys):
        raise ValueError("this test says so")

    async def get(keys, region, offsets, site):
        raise ConnectionError("this one, too")

    store.pinned, store.get_into = {"asked": asked, "entered": entered}[when], get
    worker.add(request())
    await until(lambda: len(got) == 4)
    assert [e.token_id for e in got] == tokens
    await worker.close()
    assert idle(worker)


async def test_an_abort_while_layers_arrive_ends_the_wait(model, expected):
    worker, _, got = make(model, expected[1])
    worker.add(request())
    await until(lambda: worker.batcher.running)
    await asyncio.sleep(0.05)
    worker.abort("r")
    await until(lambda: idle(worker))
    assert not got
    await worker.close()


async def test_closing_the_worker_while_layers_arrive_ends_the_wait(model, expected):
    worker, _, _ = make(model, expected[1])
    worker.add(request())
    await until(lambda: worker.batcher.running)
    await worker.close()
    assert worker.batcher.pool.references()["transfer"] == 0


async def beside_another(model, kv):
    """A worker that decodes a long answer, and a request whose prefix has begun to load."""
    worker, store, got = make(model, kv)
    worker.add(other := Request("other", [5] * 9, 9, SamplingParams(temperature=0, max_tokens=4000), 0.0, ROOT))
    await until(lambda: len(got) > 2)
    worker.add(r := request())
    return worker, store, got, other, r


def tokens_of(got, name="r"):
    return [e.token_id for e in got if e.request.request_id == name]


async def end(worker, other):
    worker.abort(other.request_id)
    await until(lambda: idle(worker))
    await worker.close()


async def test_a_request_in_company_joins_when_nobody_should_have_to_wait_for_its_layers(model, expected, monkeypatch):
    """Here that is at the end of the load."""
    tokens, kv = expected
    monkeypatch.setattr(reuse, "hides", lambda *_: False)
    worker, store, got, other, r = await beside_another(model, kv)
    loader = worker._loads.loader
    assert r.state is RequestState.LOADING or not r.looked_up
    for layers in (1, 2):
        store.letting_go.release()
        await until(lambda layers=layers: store.landed == layers)
        before = len(tokens_of(got, "other"))
        await until(lambda before=before: len(tokens_of(got, "other")) > before + 3)  # the other goes on meanwhile
        assert not tokens_of(got) and loader._held
    store.letting_go.release()
    await until(lambda: len(tokens_of(got)) == 4)
    assert tokens_of(got) == tokens and r.num_cached == 5 * BLOCK_SIZE
    await end(worker, other)


@pytest.mark.parametrize("home", ["goes on", "hangs"])
async def test_a_step_with_others_in_it_waits_for_a_late_prefix_only_so_long(model, expected, home, monkeypatch):
    """The step is taken to be so long that one layer is enough to join."""
    tokens, kv = expected
    monkeypatch.setattr(reuse, "hides", lambda landed, *_: landed >= 1)
    monkeypatch.setattr(reuse, "SHARED_STEP_MAX_WAIT_S", 60.0 if home == "goes on" else 0.2)
    worker, store, got, other, r = await beside_another(model, kv)
    store.letting_go.release()
    await until(lambda: r.num_computed == 5 * BLOCK_SIZE and r.state is RequestState.RUNNING)
    if home == "goes on":
        store.letting_go.release()
        store.letting_go.release()
        await until(lambda: len(tokens_of(got)) == 4)
        assert tokens_of(got) == tokens
    else:
        await until(lambda: tokens_of(got))
        assert [e.error for e in got if e.request is r] == ["its prefix arrived incomplete"]
        before = len(tokens_of(got, "other"))
        await until(lambda: len(tokens_of(got, "other")) > before + 3)
        assert not worker.batcher.pool.match(r.block_keys(BLOCK_SIZE))
    await end(worker, other)


async def test_a_load_in_company_that_fails_before_it_joins_is_computed(model, expected):
    tokens, kv = expected
    worker, store, got, other, _ = await beside_another(model, kv)
    store.sound = False

    async def get(keys, region, offsets, site):
        raise ConnectionError("nothing comes whole either")

    store.get_into = get
    for _ in range(3):
        store.letting_go.release()
    await until(lambda: len(tokens_of(got)) == 4)
    assert tokens_of(got) == tokens
    await end(worker, other)


def test_a_step_hides_what_lands_before_it_is_used():
    assert not hides(0, 10, 1.0, 100.0)  # nothing is known of the rate
    assert not hides(1, 10, 1.0, 1.0)  # nine more seconds to come, used within one
    assert hides(10, 10, 10.0, 0.0)
    assert hides(5, 10, 5.0, 10.0)  # as fast as it is used
    assert not hides(5, 10, 5.0, 1.0)
    assert hides(9, 10, 0.9, 1.0)


def test_a_gate_lets_each_layer_through_once_it_has_landed():
    gate, passed = LayerGate(), []

    def walk():
        for layer in range(4):
            gate.wait(layer)
            passed.append(layer)

    thread = threading.Thread(target=walk)
    thread.start()
    gate.landed(1)
    while len(passed) < 2:
        pass
    assert passed == [0, 1]
    gate.open()
    thread.join(5)
    assert passed == [0, 1, 2, 3]


async def test_a_request_that_ends_before_its_load_begins_takes_no_blocks(model, expected):
    """The load is a task of its own: an abort may come between its creation and its first line."""
    worker, _, got = make(model)
    worker.add(request("first"))
    await until(lambda: len(got) == 4)
    late = request("late")
    worker.batcher.add(0.0, late)
    worker._loads.start(0.0)
    assert late.state is RequestState.LOADING
    worker.abort("late")
    await asyncio.sleep(0.05)
    assert idle(worker)
    await worker.close()


async def test_integrity_notices_blocks_of_a_request_that_has_ended(model):
    worker, _, got = make(model)
    r = request()
    worker.add(r)
    await until(lambda: len(got) == 4)
    lost = worker.batcher.pool.match(r.block_keys(BLOCK_SIZE))
    worker.batcher.pool.acquire(lost)
    worker.batcher.check_integrity()
    with pytest.raises(IntegrityError, match="5 blocks are held for unknown requests"):
        worker.batcher.pool.check_request_owners(worker.request_blocks())
    worker.batcher.pool.release(lost)
    assert idle(worker)
    await worker.close()
