"""Drafts by a layer in the target's blocks through the real engine loop: the same tokens as without, the layer's KV
exact whatever way it came, and nothing left held.

`guessing` is a constructed checkpoint whose layer is mostly right, `random` one whose layer is mostly wrong: the
model's own layer (tests/engine/tiny_mtp.py), or that of a head (tests/engine/tiny_eagle.py)."""

from __future__ import annotations

import asyncio
import random as rnd
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.speculation.layer_drafts import LayerDrafts
from engine.speculation.speculative import Speculator
from engine.step.request import Request
from engine.step.runner import Row, Runner
from tests.engine import tiny_eagle, tiny_mtp
from tests.engine.core.test_speculation import Engine, outputs, requests, speculator
from tests.engine.tiny_llama import BLOCK_SIZE
from tests.engine.tiny_mtp import runner_of

COUNT = 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(mtp or eagle, random or guessing) -> the directory of the checkpoint."""
    made: dict[str, Path] = {}

    def directory(method: str, kind: str) -> Path:
        if method + kind not in made:
            made[method + kind] = tmp_path_factory.mktemp(kind)
            makers = {"mtp": tiny_mtp, "eagle": tiny_eagle}[method]
            (makers.save_random if kind == "random" else makers.save_agreeing)(made[method + kind])
        return made[method + kind]

    return directory


@pytest.fixture(params=["mtp", "eagle"])
def guessing(request: pytest.FixtureRequest, saved: Callable[[str, str], Path]) -> Path:
    return saved(request.param, "guessing")


@pytest.fixture(params=[(method, kind) for method in ("mtp", "eagle") for kind in ("random", "guessing")], ids="-".join)
def directory(request: pytest.FixtureRequest, saved: Callable[[str, str], Path]) -> Path:
    return saved(*request.param)


def texts(seed: int, count: int = COUNT) -> list[list[int]]:
    """Shorter and longer than a block and than a step, without common prefixes."""
    rng = rnd.Random(seed)
    return [[rng.randint(3, 210) for _ in range(rng.choice([5, 16, 33, 64, 150]))] for _ in range(count)]


def drafting(
    directory: Path, k: int, rejection: bool = True, blocks: int = 96, length: str = "fixed"
) -> tuple[Engine, Speculator]:
    drafts = LayerDrafts(rejection, 400)
    own = speculator("mtp", k, drafts, length)
    return Engine(runner_of(directory, num_blocks=blocks), own, drafts, blocks), own


def plain(directory: Path, blocks: int = 96) -> Engine:
    return Engine(runner_of(directory, drafts=False, num_blocks=blocks), blocks=blocks)


def rows_of_draft_layer(runner: Runner, block_ids: list[int], count: int) -> Tensor:
    """The layer's KV of the first `count` tokens in these blocks."""
    pool = runner.kv_pool[block_ids, runner.model.config.num_layers]  # [blocks, planes, heads, tokens, head size]
    return pool.permute(0, 3, 1, 2, 4).flatten(0, 1)[:count]


def exact_rows(directory: Path, tokens: list[int], count: int) -> Tensor:
    """The same computed in one pass over all tokens."""
    whole = runner_of(directory)
    blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
    whole.step([Row(tokens[:-1], 0, blocks, next_token=tokens[-1])])
    return rows_of_draft_layer(whole, blocks, count)


def assert_exact(engine: Engine, directory: Path, made: list[Request]) -> None:
    """The layer's KV in every full block that a request has left in the prefix cache."""
    for request in made:
        found = engine.batcher.pool.match(request.block_keys(BLOCK_SIZE))
        count = len(found) * BLOCK_SIZE
        assert count >= (request.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        # The request ends with its last token, which no step computes: the row of the token before it is known.
        count = min(count, request.num_tokens - 1)
        rows = rows_of_draft_layer(engine.worker.runner, found, count)
        expected = exact_rows(directory, request.token_ids, count)
        torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("k", [1, 3, 8])
async def test_the_greedy_tokens_of_no_speculation(directory, k):
    expected = await outputs(plain(directory), texts(1))
    engine, own = drafting(directory, k)
    made = requests(texts(1))
    await engine.run(made)
    assert [list(request.output_ids) for request in made] == expected
    assert_exact(engine, directory, made)
    rate = own.totals.per_position[0] / own.totals.steps  # of the first tokens of drafts
    assert rate > 0.5 if directory.name.startswith("guessing") else rate < 0.2
    text = engine.metrics.text().decode()
    for name, value in (
        ("drafts", own.totals.steps),
        ("draft_tokens", own.totals.drafted),
        ("accepted_tokens", own.totals.accepted),
    ):
        assert f'vllm:spec_decode_num_{name}_total{{engine="n",model_name="m"}} {value}.0' in text


async def test_lengths_by_goodput(guessing):
    expected = await outputs(plain(guessing), texts(2))
    engine, own = drafting(guessing, 4, length="auto")
    assert await outputs(engine, texts(2)) == expected
    assert own.totals.accepted > 0


@pytest.mark.parametrize("rejection", [False, True])
async def test_drawn_tokens(guessing, rejection):
    """The same draw gives the tokens of no speculation; the rejection rule accepts, and other tokens may come."""
    sampling = {"temperature": 1.0, "max_tokens": 30}
    expected = await outputs(plain(guessing), texts(3), **sampling)
    engine, own = drafting(guessing, 4, rejection)
    found = await outputs(engine, texts(3), **sampling)
    assert [len(one) for one in found] == [len(one) for one in expected]
    assert rejection or found == expected
    assert own.totals.accepted > 0


async def test_preemptions(directory):
    """Eight requests in an arena that holds about three."""
    expected = await outputs(plain(directory), texts(4))
    engine, own = drafting(directory, 4, blocks=30)
    assert await outputs(engine, texts(4)) == expected
    assert engine.batcher.num_preemptions > 0 and own.totals.drafted > 0


async def test_a_cached_prefix_has_the_layers_kv(guessing):
    """The second request finds the blocks of the first, its answer too, and drafts over them."""
    (text,) = texts(5, 1)
    engine, own = drafting(guessing, 4)
    (first,) = requests([text], max_tokens=60)
    await engine.run([first])
    again = [*first.token_ids[:-1]]
    (expected,) = await outputs(plain(guessing), [again], max_tokens=30)
    other, own = drafting(guessing, 4)
    found = engine.batcher.pool.match(first.block_keys(BLOCK_SIZE))
    (second,) = requests([again], max_tokens=30)
    keys = second.block_keys(BLOCK_SIZE)[: len(found)]
    there = other.batcher.pool.allocate(len(found))
    other.worker.runner.kv_pool[there] = engine.worker.runner.kv_pool[found]
    for key, block in zip(keys, there, strict=True):
        other.batcher.pool.name(block, key)
    other.batcher.pool.release(there)
    await other.run([second])
    assert second.num_cached == len(found) * BLOCK_SIZE > 0
    assert list(second.output_ids) == expected
    assert own.totals.accepted / own.totals.drafted > 0.5
    assert_exact(other, guessing, [second])


async def test_kv_from_a_prefill_node_is_drafted_over(guessing):
    """A decode node: it computes nothing of the prompt, neither for the model nor for the layer."""
    text = texts(6, 1)[0][:5] * 32  # ten blocks, all of them named
    (expected,) = await outputs(plain(guessing), [text], max_tokens=50)
    elsewhere, _ = drafting(guessing, 4)
    (remote,) = requests([text], max_tokens=1)
    await elsewhere.run([remote])
    engine, own = drafting(guessing, 4)
    (here,) = requests([text], max_tokens=50)
    engine.batcher.reserve(0.0, here)
    found = elsewhere.batcher.pool.match(here.block_keys(BLOCK_SIZE))
    assert len(found) == len(here.block_ids) == 10
    engine.worker.runner.kv_pool[here.block_ids] = elsewhere.worker.runner.kv_pool[found]
    engine.batcher.arrived(0.0, here, expected[0])
    await engine.run([])
    assert list(here.output_ids) == expected
    assert own.totals.accepted / own.totals.drafted > 0.5
    assert_exact(engine, guessing, [here])


async def test_a_stop_inside_an_accepted_run_ends_the_request_there(guessing):
    (text,) = texts(7, 1)
    (said,) = await outputs(plain(guessing), [text])
    at = next(i for i in range(3, 30) if said[i] not in said[:i])
    engine, _ = drafting(guessing, 8)
    assert await outputs(engine, [text], stop_token_ids=(said[at],)) == [said[: at + 1]]


async def test_aborts_at_any_moment_leave_nothing(guessing):
    rng = rnd.Random(13)
    engine, own = drafting(guessing, 4, blocks=40)
    made = requests(texts(8, 12), max_tokens=60)

    async def abort() -> None:
        while engine.batcher.requests:
            engine.worker.abort(rng.choice(sorted(engine.batcher.requests)))
            await asyncio.sleep(rng.random() * 0.02)

    running = asyncio.create_task(engine.run(made))
    await asyncio.sleep(0.05)
    await abort()
    await running
    assert own.state()["requests"] == 0


async def test_log_probabilities_of_prompts_and_tokens(guessing):
    found = []
    for engine in (plain(guessing), drafting(guessing, 4)[0]):
        made = requests(texts(9, 3), logprobs=2, prompt_logprobs=1)
        await engine.run(made)
        found.append((made, engine.emissions))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one.token_ids == other.token_ids
        scores = [[each.logprob for each in request.prompt_logprobs] for request in (one, other)]
        assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    logprobs = [
        {(e.request.request_id, i): e.logprobs.logprob for i, e in enumerate(sorted(emitted, key=_by_request))}
        for _, emitted in found
    ]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)


def _by_request(emission: object) -> str:
    return emission.request.request_id  # type: ignore[attr-defined, no-any-return]
