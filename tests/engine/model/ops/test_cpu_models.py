"""Whole models with CpuOps: as close to float32 as with TorchOps in bfloat16."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.choice.choose import choose
from attention.cpu.level import levels_here
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.model.decoder import Model
from engine.model.layers_cpu import Stop, Stopped
from engine.model.ops.cpu import CpuOps
from engine.model.ops.interface import TorchOps
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.step.runner import Row, Runner
from tests.engine.model.test_model import blocks_for, tokens
from tests.engine.tiny_families import empty_pool, save
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of

pytestmark = pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")


@pytest.fixture
def ops() -> CpuOps:
    torch.set_num_threads(1)
    return CpuOps()


@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3", "qwen3moe-mixed", "gemma2-caps"])
def test_families(ops, family, tmp_path):
    """As close to the float32 model as TorchOps in bfloat16 is: a prompt in chunks, then decodes. On average; with
    experts by the median row, for where two are nearly tied a row may take the other one. And in float32 the same."""
    save(family, tmp_path)
    source = describe(str(tmp_path))

    def logits(dtype: torch.dtype, ops: TorchOps) -> Tensor:
        model = Model(source.config, weights.load(source, dtype), choose("torch", "cpu"), ops=ops)
        runner, ids, parts = Runner(model, empty_pool(source, dtype), BLOCK_SIZE), tokens(70), []
        for start, end in ((0, 40), (40, 68), (68, 69), (69, 70)):
            parts.append(logits_of(runner, [Row(ids[start:end], start, blocks_for(70))]))
        return torch.cat(parts)

    truth = logits(torch.float32, TorchOps())
    rows = [(logits(torch.bfloat16, each) - truth).abs().mean(-1) for each in (ops, TorchOps())]
    error, plain = (each.median() if source.config.num_experts else each.mean() for each in rows)
    print(family, error, plain)
    assert 0 < error <= 1.25 * plain
    torch.testing.assert_close(logits(torch.float32, CpuOps(dtype=torch.float32)), truth, rtol=0, atol=1e-4)


def test_the_embedded_model(ops, embedded, embedded_weights, embedded_tokenizer):
    """Its greedy answer, and the logits of each of its positions compared with float32's."""
    config = embedded.config
    prompt = embedded_tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    ids, blocks = list(prompt), list(range(8))

    def runner(dtype: torch.dtype, ops: TorchOps) -> Runner:
        of = {name: weight.to(dtype) for name, weight in embedded_weights.items()}
        pool = torch.zeros(8, config.num_layers, 2, config.num_kv_heads, 16, config.head_size, dtype=dtype)
        return Runner(Model(config, of, choose("torch", "cpu"), ops=ops), pool, 16)

    ours, greedy = runner(torch.bfloat16, ops), SamplingParams(temperature=0, ignore_eos=True)
    start = 0
    for _ in range(8):
        ((sampled,),) = ours.step([Row(ids[start:], start, blocks, SamplingRow(greedy, list(ids), len(prompt)))])
        start = len(ids)
        ids.append(sampled.token_id)
    assert embedded_tokenizer.decode(ids[len(prompt) :]).startswith("The capital of France is Paris.")
    row = Row(ids, 0, blocks)
    truth = logits_of(runner(torch.float32, TorchOps()), [row])
    error, plain = ((logits_of(each, [row]) - truth).abs() for each in (ours, runner(torch.bfloat16, TorchOps())))
    assert error.mean() <= 1.25 * plain.mean() and error.max() <= 1.5 * plain.max()


@pytest.mark.parametrize("family", ["llama-bias", "mistral", "mistral-full"])
def test_all_layers_in_one_call_are_what_they_are_one_by_one(ops, family, tmp_path):
    """A chunk with two decodes, with window where the family has one: the same bits, in the pool too."""
    save(family, tmp_path)
    source = describe(str(tmp_path))
    model = Model(source.config, weights.load(source, torch.bfloat16), choose("cpu", "cpu"), ops=ops)
    assert model.layers_at_once is not None
    ids, tables = tokens(90), [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    found = []
    for one_by_one in (False, True):
        pool = empty_pool(source, torch.bfloat16)
        runner, layers = Runner(model, pool, BLOCK_SIZE), []
        on_layer = layers.append if one_by_one else None
        found.append([])
        for rows in (
            [Row(ids[:40], 0, tables[0]), Row(ids[40:60], 0, tables[1]), Row(ids[60:70], 0, tables[2])],
            [Row(ids[5:6], 40, tables[0]), Row(ids[6:7], 20, tables[1]), Row(ids[70:90], 10, tables[2])],
        ):
            inputs = runner._inputs.build(rows)
            every = torch.arange(len(inputs.token_ids))
            found[-1].append(model.forward(inputs.token_ids, inputs.batch, pool, every, on_layer))
        found[-1].append(pool)
        assert layers == [*range(source.config.num_layers)] * 2 * one_by_one
    for ours, expected in zip(*found, strict=True):
        assert ours.nan_to_num().abs().max() > 0  # what no request has written in the pool is NaN
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


class Half:
    """Kernels of which a list of calls is stopped in its middle."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels, self.tail_call = kernels, kernels.tail_call

    def run_calls(self, calls: int, count: int, stop: int | None) -> int:
        self._kernels.run_calls(calls, count // 2, None)
        return 0


class AtLayer(Stop):
    """Stops in front of a layer."""

    def __call__(self, layer: int) -> None:
        self.set(layer == 1)
        super().__call__(layer)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_pass_that_was_stopped_changes_nothing_for_the_next_one(ops, one_by_one, tmp_path, monkeypatch):
    """Stopped when some layers have written to the pool, and computed again, a chunk and decodes give the same bits,
    in the pool too."""
    save("mistral", tmp_path)
    source = describe(str(tmp_path))
    model = Model(source.config, weights.load(source, torch.bfloat16), choose("cpu", "cpu"), ops=ops)
    if one_by_one:
        model.layers_at_once = None
    ids, tables, found = tokens(90), [[0, 1, 2], [3, 4, 5]], []
    for stops in (False, True):
        pool, stop = empty_pool(source, torch.bfloat16), Stop()
        runner = Runner(model, pool, BLOCK_SIZE)
        for rows in (
            [Row(ids[:40], 0, tables[0]), Row(ids[40:60], 0, tables[1])],
            [Row(ids[5:6], 40, tables[0]), Row(ids[70:90], 20, tables[1])],
        ):
            inputs = runner._inputs.build(rows)
            every = torch.arange(len(inputs.token_ids))
            if stops:
                before = pool.clone()
                with pytest.raises(Stopped), monkeypatch.context() as patched:
                    if not one_by_one:
                        patched.setattr(model.layers_at_once, "_kernels", Half(ops.kernels))
                    model.forward(inputs.token_ids, inputs.batch, pool, every, before_layer=AtLayer())
                assert not torch.equal(before.nan_to_num(), pool.nan_to_num()), "it has written some KV"
            logits = model.forward(inputs.token_ids, inputs.batch, pool, every, before_layer=stop)
        found.append((logits, pool))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def test_a_list_of_calls_ends_where_another_thread_stops_it(ops):
    stop, ran = Stop(), list[int]()
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def second(argument: int | None) -> None:
        ran.append(2)
        stop.set(True)

    functions = [call(lambda argument: ran.append(1)), call(second), call(lambda argument: ran.append(3))]
    calls = np.array([(ctypes.cast(function, ctypes.c_void_p).value, 0) for function in functions], np.uint64)
    assert not ops.kernels.run_calls(calls.ctypes.data, len(calls), stop.address) and ran == [1, 2]
    stop.set(False)
    assert ops.kernels.run_calls(calls.ctypes.data, 1, stop.address) and ran == [1, 2, 1]
    assert ops.kernels.run_calls(calls.ctypes.data, len(calls), None) and ran == [1, 2, 1, 1, 2, 3]


def test_layers_that_need_more_than_kernels_go_one_by_one(ops, tmp_path):
    for family in ("qwen3", "gemma2-caps", "qwen3moe-mixed"):
        save(family, tmp_path / family)
        source = describe(str(tmp_path / family))
        model = Model(source.config, weights.load(source, torch.bfloat16), choose("cpu", "cpu"), ops=ops)
        assert model.layers_at_once is None
