"""Whole steps of the embedded model, with TorchOps and with CpuOps. They run Runner, sampler and the cpu attention
backend, over weights in bfloat16 and as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attention.choice.choose import choose
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import load_quantized
from engine.config.config import EMBEDDED_MODEL
from engine.model.decoder import Model
from engine.model.ops.cpu import CpuOps
from engine.model.ops.interface import Ops, TorchOps
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.step.inputs import Row
from engine.step.runner import Runner
from lab.bench.common.results import Row as Result
from lab.bench.ops.products import shortest

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def runner(ops: Ops, num_blocks: int, stored: bool = False) -> Runner:
    source = describe(EMBEDDED_MODEL)
    config, dtype = source.config, torch.bfloat16
    loaded: dict[str, Any] = load_quantized(source, "stored", dtype) if stored else weights.load(source, dtype)
    model = Model(config, loaded, choose("cpu", "cpu"), ops=ops)
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    return Runner(model, torch.zeros(shape, dtype=torch.bfloat16), BLOCK_SIZE)


def step_rows(
    batches: Sequence[int], contexts: Sequence[int], prompts: Sequence[int], threads: Sequence[int]
) -> list[Result]:
    """Milliseconds: one token for each of `batches` requests of `contexts` tokens, and prefill of `prompts` tokens."""
    per_request = -(-max(*contexts, *prompts) // BLOCK_SIZE)
    cases = {}
    for context in contexts:
        for batch in batches:
            blocks = [list(range(i * per_request, (i + 1) * per_request)) for i in range(batch)]
            sampling = SamplingRow(GREEDY, [1] * context, context)
            rows = [Row([5 + i], context - 1, own, sampling) for i, own in enumerate(blocks)]
            cases[f"decode {batch} x {context}"] = rows
    for prompt in prompts:
        sampling = SamplingRow(GREEDY, [1] * prompt, prompt)
        cases[f"prefill {prompt}"] = [Row([5] * prompt, 0, list(range(per_request)), sampling)]
    times: dict[tuple[str, int], dict[str, float]] = {}
    for name, ops in (("ours", CpuOps()), ("stored", CpuOps(products="groups")), ("TorchOps", TorchOps())):
        each = runner(ops, max(batches) * per_request, name == "stored")
        for count in threads:
            torch.set_num_threads(count)
            for case, rows in cases.items():
                times.setdefault((case, count), {})[name] = 1e3 * shortest(partial(each.step, rows))
    found = []
    for (case, count), by in times.items():
        where = f"{case}, {count} threads"
        found.append(Result(where, "step", "ms", by["ours"], {"TorchOps": by["TorchOps"]}))
        found.append(Result(f"{where}, weights as stored", "step", "ms", by["stored"], {"bfloat16": by["ours"]}))
    return found
