"""Buckets of CUDA graphs, and that a step padded into one gives the same logits and writes the same KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.choice.choose import choose
from engine.model.decoder import Model
from engine.model.graphs import VERIFIED_ROWS, Bucket, GraphedModel, StaticStep, buckets, decode_sizes, obstacle
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.logprobs import PromptScores
from engine.sampling.params import SamplingParams
from engine.sampling.token_logprobs import PromptLogprobs
from engine.step.inputs import InputBuilder, Inputs, Row
from engine.step.runner import Runner
from tests.engine.tiny_llama import BLOCK_SIZE, our_config, our_weights, tiny

CPU = torch.device("cpu")
STEPS = {
    "one decode": [Row([5], 20, [3, 1])],
    "three decodes": [Row([5], 20, [3, 1]), Row([9], 0, [2]), Row([7], 15, [4])],
    "one chunk": [Row([1, 2, 3, 4], 14, [3, 1])],
    "two chunks": [Row([1, 2, 3], 0, [5]), Row([8, 9], 30, [3, 1])],
    "verify": [Row([5], 20, [3, 1]), Row([7, 8, 9], 10, [4]), Row([1, 2, 3], 15, [5, 6])],
    "both": [Row([5], 20, [3, 1]), Row([9], 0, [2]), Row([7, 8, 9], 10, [4]), Row([1, 2], 0, [5])],
}


def last_rows(inputs: Inputs) -> torch.Tensor:
    """Of every request: these rows ask for no tokens, so the step itself asks for no logits."""
    return inputs.batch.cu_q[1:].long() - 1


def model_over(backend: str, layers: int) -> Model:
    theirs = tiny(layers=layers)
    return Model(our_config(theirs), our_weights(theirs), choose(backend, "cpu"))


@given(st.integers(1, 600))
def test_the_sizes_rise_to_the_most(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1


@given(st.integers(1, 300), st.data())
def test_every_decode_step_has_a_bucket_that_wastes_little(most: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, most))
    inputs = InputBuilder(BLOCK_SIZE, CPU).build([Row([1], 0, [0])] * count)
    found = next(bucket for bucket in buckets(most) if bucket.holds(inputs.batch, count))
    assert found.chunks == 0 and found.decodes <= max(count + 63, 2 * count)


def test_what_fits_no_bucket() -> None:
    def fits(rows: list[Row], wanted: int) -> list[Bucket]:
        batch = InputBuilder(BLOCK_SIZE, CPU).build(rows).batch
        return [bucket for bucket in buckets(4) if bucket.holds(batch, wanted)]

    chunk = Row([1] * 16, 0, [0])
    assert fits([chunk] * 4, 4)[0] == Bucket(0, 4, 64)
    assert not fits([chunk] * 5, 5), "more chunks than any has"
    assert not fits([Row([1] * 257, 0, list(range(17)))], 1), "more rows"
    assert not fits([Row([1], 0, [0])] * 5, 5), "more decodes"
    assert not fits([chunk], 9), "more logits than requests"


def test_steps_that_verify_drafts_have_buckets_of_their_own() -> None:
    """Every row has logits there; a request without a draft is a chunk of one row."""

    def found(rows: list[Row], wanted: int, drafts: int = 4) -> Bucket | None:
        batch = InputBuilder(BLOCK_SIZE, CPU).build(rows).batch
        return next((bucket for bucket in buckets(16, drafts) if bucket.holds(batch, wanted)), None)

    draft, plain = Row([1] * 5, 20, [0, 1, 2]), Row([1], 20, [0, 1, 2])
    assert found([draft], 5) == Bucket(0, 1, 5, longest=5)
    assert found([draft, plain], 6) == found([draft] * 2, 10) == Bucket(0, 2, 10, longest=5)
    assert found([plain, plain], 2) == Bucket(2), "no draft in this step"
    assert found([draft] * 16, 80) == Bucket(0, 16, 80, longest=5)
    assert found([Row([1] * 6, 20, [0, 1, 2])] * 16, 96) is None, "a draft longer than any of this node"
    assert found([draft] * 17, 85) is None
    assert not [bucket for bucket in buckets(16) if bucket.longest], "without speculation"
    assert max(bucket.num_rows for bucket in buckets(256, 7) if bucket.longest) <= VERIFIED_ROWS


@pytest.mark.parametrize("name", ["both", "verify"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_verifying_step_has_the_logits_of_all_rows(backend: str, name: str) -> None:
    model = model_over(backend, layers=2)
    config = model.config
    shape = (8, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    padded_pool = pool.clone()
    static = StaticStep(Bucket(0, 5, 20, longest=4), 16, BLOCK_SIZE, CPU)
    for rows in (STEPS["both"], STEPS[name]):
        inputs = InputBuilder(BLOCK_SIZE, CPU).build(rows)
        every = torch.arange(len(inputs.token_ids))
        static.load(inputs.token_ids, inputs.batch, every)
        expected = model.forward(inputs.token_ids, inputs.batch, pool, every)
        logits = model.forward(static.token_ids, static.batch, padded_pool, static.rows)
        assert len(logits) == 20 and len(expected) == len(inputs.token_ids)
        torch.testing.assert_close(logits[: len(expected)], expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(padded_pool, pool, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_padding_changes_nothing(backend: str, name: str) -> None:
    model = model_over(backend, layers=2)
    config = model.config
    shape = (8, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    padded_pool = pool.clone()
    static = StaticStep(Bucket(5, 4, 16), 16, BLOCK_SIZE, CPU)
    for rows in (STEPS["both"], STEPS[name]):  # what the step before left behind has no effect
        inputs = InputBuilder(BLOCK_SIZE, CPU).build(rows)
        static.load(inputs.token_ids, inputs.batch, last_rows(inputs))
        expected = model.forward(inputs.token_ids, inputs.batch, pool, last_rows(inputs))
        logits = model.forward(static.token_ids, static.batch, padded_pool, static.rows)
        assert len(logits) == 9 and len(expected) == len(rows)
        torch.testing.assert_close(logits[: len(expected)], expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(padded_pool, pool, rtol=1e-3, atol=1e-4)


def test_graphs_are_refused_without_a_gpu() -> None:
    assert "--device cuda" in str(obstacle(model_over("torch", layers=1)))


class CpuRecorder:
    """In place of CUDA graphs: a replay runs the function again."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return replay


def test_a_runner_replays_small_steps_and_computes_the_others() -> None:
    """Two runners over pools of their own choose the same tokens, step for step."""
    model, recorder = model_over("torch", layers=2), CpuRecorder()
    config = model.config
    shape = (8, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    plain, graphed = (Runner(model, torch.zeros(shape), BLOCK_SIZE) for _ in range(2))
    graphed.record(recorder, max_num_seqs=4, max_model_len=8 * BLOCK_SIZE, max_drafts=5)
    recorder.replays = 0
    greedy = SamplingParams(temperature=0.0)
    long = list(range(3, 3 + 5 * BLOCK_SIZE))  # five chunks' worth: still a bucket
    steps: list[tuple[list[Row], bool]] = [
        ([Row(long, 0, [0, 1, 2, 3, 4, 5], SamplingRow(greedy, long, len(long)))], True),
        ([Row([7], len(long), [0, 1, 2, 3, 4, 5], SamplingRow(greedy, [*long, 7], len(long)))], True),
        ([Row([7, 8, 9], 0, [6], SamplingRow(greedy, [7, 8, 9], 3), 3)], True),  # logits of three rows
        ([Row([7, 8, 9, 3, 4, 5], 0, [6], SamplingRow(greedy, [7, 8, 9, 3, 4, 5], 3), 4)] * 2, True),  # two drafts
        ([Row([1] * 5, 0, [7])] * 5, False),  # more chunks than any bucket has
    ]
    for rows, replayed in steps:
        before = recorder.replays
        ours, theirs = graphed.step(rows), plain.step(rows)
        assert [[t.token_id for t in row] for row in ours] == [[t.token_id for t in row] for row in theirs]
        assert recorder.replays - before == replayed
    found = PromptLogprobs()
    scored = [Row([7, 8, 9], 0, [6], scores=PromptScores(0, [8, 9], 1, found))]
    before = recorder.replays
    for runner in (graphed, plain):
        runner.step(scored)
    assert recorder.replays == before and found[:2] == found[2:], "nor is one that scores a prompt"
    layers: list[int] = []
    graphed.step(steps[1][0], layers.append)
    assert layers == list(range(config.num_layers)), "a step that has to tell of its layers is not replayed"
    torch.testing.assert_close(graphed.kv_pool, plain.kv_pool, rtol=1e-3, atol=1e-4)


def test_all_buckets_leave_their_logits_in_the_same_rows() -> None:
    """Each with its own would be a gigabyte of float32 for 256 requests and a vocabulary of 128,256."""
    model = model_over("torch", layers=1)
    pool = torch.zeros(8, 1, 2, model.config.num_kv_heads, BLOCK_SIZE, model.config.head_size)
    sizes = {"max_num_seqs": 16, "max_model_len": 8 * BLOCK_SIZE}
    recorded = GraphedModel(model, pool, BLOCK_SIZE, CpuRecorder(), **sizes).recorded
    assert len(recorded) > 10
    storages = {one.logits.untyped_storage().data_ptr(): one.logits.untyped_storage().nbytes() for one in recorded}
    assert sum(storages.values()) == max(one.logits.nbytes for one in recorded)


def test_recording_writes_to_no_block() -> None:
    """A decode node takes reservations while it starts: what has landed for them stays as it is."""
    model = model_over("torch", layers=1)
    pool = torch.randn(8, 1, 2, model.config.num_kv_heads, BLOCK_SIZE, model.config.head_size)
    before = pool.clone()
    GraphedModel(model, pool, BLOCK_SIZE, CpuRecorder(), max_num_seqs=16, max_model_len=8 * BLOCK_SIZE)
    assert torch.equal(pool, before)
