"""Speculation through the real engine loop on tiny random models: the same tokens as without, and nothing left held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher, BatchRules
from engine.core.costs import StepCosts
from engine.core.emissions import Emission
from engine.core.worker import Drafts, Reuse, Worker
from engine.handoff.reuse import Publisher
from engine.sampling.params import SamplingParams
from engine.speculation.draft import DraftModel
from engine.speculation.layer_drafts import LayerDrafts
from engine.speculation.ngram import NgramLookups
from engine.speculation.speculative import Speculator, VerifyCost
from engine.speculation.suffix import SuffixLookups, SuffixRules
from engine.step.request import Request
from engine.step.runner import Runner
from net.metrics.events import Metrics
from tests.engine.tiny_llama import BLOCK_SIZE, runner, tiny

ROOT = root_key("tiny", BlockGeometry(3, 2, 32, BLOCK_SIZE, "float32"))
GEOMETRY = BlockGeometry(3, 2, 32, BLOCK_SIZE, "float32")
MAX_LEN = 400
COST = VerifyCost(0.01, 0.0, 0.0, 5e-4)


class NoPrefix:
    async def load(self, request: Request) -> None:
        pass


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def small():
    return tiny(layers=1)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Texts that repeat pieces of themselves, some with a common prefix of two blocks."""
    rng = random.Random(seed)
    shared = [rng.randint(3, 210) for _ in range(2 * BLOCK_SIZE)]
    texts = []
    for i in range(count):
        piece = [rng.randint(3, 210) for _ in range(rng.randint(2, 20))]
        texts.append((shared if i % 2 else []) + piece * rng.randint(1, 4))
    return texts


class Engine:
    """Worker, batcher and runner as engine/node/engine.py wires them, without a network."""

    def __init__(
        self, model: Any, speculator: Speculator | None = None, draft: DraftModel | LayerDrafts | None = None, blocks=64
    ):
        """model: transformers', or a runner with a pool of `blocks` blocks."""
        self.draft, self.metrics = draft, Metrics("m", "n")
        pool = BlockPool(blocks)
        self.batcher = Batcher(pool, BLOCK_SIZE, 8, 128, MAX_LEN, {2}, BatchRules(speculator=speculator))
        publisher = Publisher(pool, None, self.metrics)
        self.worker = Worker(
            self.batcher, model if isinstance(model, Runner) else runner(model, num_blocks=blocks),
            Reuse(NoPrefix(), publisher), StepCosts(), self.metrics, Drafts(speculator, draft),
        )  # fmt: skip
        self.emissions: list[Emission] = []

    async def run(self, requests: Sequence[Request]) -> None:
        """Until all have ended, the requests that are here already too."""
        self.worker.start(self.emissions.extend)
        for request in requests:
            self.worker.add(request)
        async with asyncio.timeout(60):
            while self.batcher.requests or self.batcher.pool.usage()["held"]:  # noqa: ASYNC110 - a state, no event
                await asyncio.sleep(0.001)
        await self.worker.close()
        self.batcher.check_integrity()
        assert self.batcher.pool.references() == {"request": 0, "transfer": 0}
        if isinstance(self.draft, DraftModel):
            self.draft.pool.check_integrity()
            assert self.draft.pool.usage()["held"] == 0
        assert self.draft is None or not self.draft.state()["requests"]


def speculator(method: str, k: int, draft: DraftModel | LayerDrafts | None = None, length: str = "fixed") -> Speculator:
    lookups = {"ngram": NgramLookups(1, 4), "suffix": SuffixLookups(SuffixRules())}.get(method)
    return Speculator(method, k, lookups, length, MAX_LEN, lambda rows, context: COST, draft)


def requests(texts: list[list[int]], **sampling: Any) -> list[Request]:
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True} | sampling
    return [
        Request(f"r{i}", list(text), len(text), SamplingParams(**params | {"seed": i}), float(i), ROOT)
        for i, text in enumerate(texts)
    ]


async def outputs(engine: Engine, texts: list[list[int]], **sampling: Any) -> list[list[int]]:
    made = requests(texts, **sampling)
    await engine.run(made)
    said: dict[str, list[int]] = {r.request_id: [] for r in made}
    for emission in engine.emissions:
        assert emission.error is None
        said[emission.request.request_id].append(emission.token_id)
    assert [said[r.request_id] for r in made] == [list(r.output_ids) for r in made]
    return [list(r.output_ids) for r in made]


@pytest.fixture(scope="module")
def plain(target):
    """Greedy answers without speculation."""

    async def answers() -> list[list[int]]:
        return await outputs(Engine(target), prompts(10, seed=1))

    return asyncio.run(answers())


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
async def test_ngrams_give_the_greedy_tokens_of_no_speculation(target, plain, k):
    own = speculator("ngram", k)
    assert await outputs(Engine(target, own), prompts(10, seed=1)) == plain
    assert own.totals.accepted > 0


@pytest.mark.parametrize("k", [1, 4, 8])
async def test_another_model_as_draft_gives_the_greedy_tokens(target, small, plain, k):
    draft = DraftModel(runner(small), rejection=True)
    own = speculator("draft", k, draft)
    assert await outputs(Engine(target, own, draft), prompts(10, seed=1)) == plain
    assert 0 < own.totals.accepted < own.totals.drafted


async def test_automatic_lengths_change_no_token(target, plain):
    own = speculator("ngram", 6, length="auto")
    assert await outputs(Engine(target, own), prompts(10, seed=1)) == plain
    assert own.totals.drafted > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft"])
async def test_preempted_requests_too(target, small, method):
    """Room for a third of the load, and for a part of the drafts."""
    texts = [text + [5 + i] * 20 for i, text in enumerate(prompts(8, seed=3))]
    expected = await outputs(Engine(target), texts, max_tokens=60)
    draft = DraftModel(runner(small, num_blocks=12), rejection=True) if method == "draft" else None
    own = speculator(method, 4, draft)
    engine = Engine(target, own, draft, blocks=20)
    assert await outputs(engine, texts, max_tokens=60) == expected
    assert engine.batcher.num_preemptions > 0 and own.totals.drafted > 0


SAMPLED = [{}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}]


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
@pytest.mark.parametrize("method", ["ngram", "draft"])
async def test_the_same_draw_gives_the_sampled_tokens_of_no_speculation(target, small, method, sampling):
    texts = prompts(8, seed=5)
    how = {"temperature": 1.0, "max_tokens": 30, "min_tokens": 12, "ignore_eos": False} | sampling
    expected = await outputs(Engine(target), texts, **how)
    draft = DraftModel(runner(small), rejection=False) if method == "draft" else None
    own = speculator(method, 4, draft)
    assert await outputs(Engine(target, own, draft), texts, **how) == expected
    assert own.totals.drafted > 0


@pytest.mark.parametrize("rejection", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
async def test_the_model_as_its_own_draft_is_always_right(target, rejection, sampling):
    draft = DraftModel(runner(target), rejection)
    own = speculator("draft", 4, draft)
    texts = prompts(6, seed=7)
    tokens = await outputs(Engine(target, own, draft), texts, **sampling)
    assert tokens == await outputs(Engine(target), texts, **sampling)
    assert own.totals.accepted == own.totals.drafted > 100


async def test_logprobs_are_those_of_no_speculation(target):
    texts = prompts(3, seed=9)
    results = []
    for own in (None, speculator("ngram", 4)):
        engine = Engine(target, own)
        await outputs(engine, texts, logprobs=3)
        results.append({(e.request.request_id, n): e for r in range(3) for n, e in enumerate(
            e for e in engine.emissions if e.request.request_id == f"r{r}")})  # fmt: skip
    for at, one in results[0].items():
        other = results[1][at]
        assert other.logprobs.logprob == pytest.approx(one.logprobs.logprob, abs=1e-4)
        assert [token for token, _ in other.logprobs.top] == [token for token, _ in one.logprobs.top]


async def test_a_stop_inside_an_accepted_run_ends_the_request_there(target, plain):
    """With the model as its own draft, output 1 to 9 is one run."""
    stop_at = next(i for i in range(3, 9) if plain[0][i] not in plain[0][:i])
    draft = DraftModel(runner(target), rejection=True)
    own = speculator("draft", 8, draft)
    engine = Engine(target, own, draft)
    (said,) = await outputs(engine, prompts(10, seed=1)[:1], stop_token_ids=(plain[0][stop_at],))
    assert said == plain[0][: stop_at + 1]
    assert [e.num_behind for e in engine.emissions] == [0, *range(stop_at - 1, -1, -1)]
    assert engine.emissions[-1].request.finish_reason == "stop"


async def test_kv_that_came_from_another_node_is_drafted_for(target, small):
    """A decode node: the target's KV is pushed here, the draft model computes its own of the prompt, in chunks."""
    text = prompts(1, seed=11)[0] * 40  # several chunks of the draft model
    text = text[:300]
    (expected,) = await outputs(Engine(target), [text], max_tokens=40)
    draft = DraftModel(runner(small), rejection=True)
    own = speculator("draft", 4, draft)
    engine = Engine(target, own, draft)
    elsewhere = Engine(target)
    (remote,) = requests([text], max_tokens=1)
    await elsewhere.run([remote])
    (here,) = requests([text], max_tokens=40)
    engine.batcher.reserve(0.0, here)
    source = elsewhere.worker.runner.kv_pool
    keys = here.block_keys(BLOCK_SIZE)
    found = elsewhere.batcher.pool.match(keys)
    assert len(found) == len(text) // BLOCK_SIZE
    engine.worker.runner.kv_pool[here.block_ids[: len(found)]] = source[found]
    rest = len(text) % BLOCK_SIZE
    assert rest  # the unnamed last block is computed at its old place
    last = next(b for b in range(len(source)) if source[b, 0, 0, 0, rest - 1, 0].isfinite() and b not in found)
    engine.worker.runner.kv_pool[here.block_ids[-1]] = source[last]
    engine.batcher.arrived(0.0, here, expected[0])
    await engine.run([])
    assert list(here.output_ids) == expected
    assert own.totals.drafted > 0


async def test_aborts_at_any_moment_leave_nothing(target, small):
    rng = random.Random(13)
    draft = DraftModel(runner(small, num_blocks=24), rejection=True)
    own = speculator("draft", 4, draft)
    engine = Engine(target, own, draft, blocks=40)
    made = requests(prompts(12, seed=13), max_tokens=60)

    async def abort() -> None:
        while engine.batcher.requests:
            engine.worker.abort(rng.choice(sorted(engine.batcher.requests)))
            await asyncio.sleep(rng.random() * 0.02)

    running = asyncio.create_task(engine.run(made))
    await asyncio.sleep(0.01)
    await abort()
    await running
    assert own.state()["requests"] == 0


async def test_every_decoded_row_counts_and_not_only_those_with_a_draft(target):
    own = speculator("ngram", 4)
    made = requests(prompts(4, seed=1))
    await Engine(target, own).run(made)
    state = own.state()
    assert state["decode_rows"] > state["verified_rows"] > 0
    decoded = sum(r.num_output_tokens - 1 for r in made)  # the first is the prompt's
    assert state["decode_rows"] + state["accepted_tokens"] == decoded


async def test_the_first_token_of_a_request_that_another_node_decodes_is_no_decode(target):
    own = speculator("ngram", 4)
    (text,) = prompts(1, seed=1)
    (short,) = requests([text[:1]])
    short.handover = True
    await Engine(target, own).run([short])
    assert short.num_output_tokens == 1 and own.state()["decode_rows"] == 0


async def test_metrics_count_drafts(target):
    own = speculator("ngram", 4)
    engine = Engine(target, own)
    await outputs(engine, prompts(4, seed=1))
    text = engine.metrics.text().decode()
    for name, value in (
        ("drafts", own.totals.steps),
        ("draft_tokens", own.totals.drafted),
        ("accepted_tokens", own.totals.accepted),
    ):
        assert f'vllm:spec_decode_num_{name}_total{{engine="n",model_name="m"}} {value}.0' in text
    position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="n",model_name="m",position="0"}'
    assert f"{position} {own.totals.per_position[0]}.0" in text
