"""Host time of a decode step: the engine's work without the model, on one thread.

  scripts/bench.py host                      # 1, 32, 128 rows at 1k and 8k tokens of context
  scripts/bench.py host --quick --json host.json

A step's host work is schedule (batcher), rows (requests to rows), inputs (rows to tensors), sample (logits to tokens)
and commit. The model is left out: logits are random, the same every step. Times are medians in microseconds.

Floors of the same run: for the metadata, copying the same number of bytes once and one empty call per row; for the
sampler, reading the logits once (numpy's max). For comparison: a decode step of Llama-3-8B in bfloat16 on a GPU of 4.8
TB/s takes bytes / bandwidth: 16.1 GB of weights and 128 KiB of KV per token of context.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import sample
from engine.step.inputs import InputBuilder, Inputs
from engine.step.request import Request
from engine.step.rows import row_of
from lab.bench.common.results import Row as Result
from lab.bench.common.results import add_result_flags, report
from lab.bench.common.timing import timed
from lab.flag_types import positive

PARTS = ("schedule", "rows", "inputs", "sample", "commit")
MIXES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 0.8, "top_p": 0.9}}
VOCAB = 49152
FLOOR_REPEATS = 20
GPU_BYTES_PER_S = 4.8e12
LLAMA_8B_BYTES, LLAMA_8B_KV_BYTES = 16.06e9, 131072


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--block-size", type=positive, default=16, help="tokens per KV block")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(1)
    shapes = [(1, 1024), (32, 1024)] if args.quick else [(n, c) for n in (1, 32, 128) for c in (1024, 8192)]
    results: list[Result] = []
    for mix in MIXES:
        for rows, context in shapes:
            if mix == "greedy" or context == 1024:  # the context does not affect the sampler
                results += measure(mix, rows, context, args.block_size, steps=10 if args.quick else 40)
    report({name: value for name, value in vars(args).items() if name != "json"}, results, args.json)
    return 0


def measure(mix: str, rows: int, context: int, block_size: int, steps: int) -> list[Result]:
    """Medians over `steps` steps of `rows` decodes that start at `context` tokens."""
    batcher = batch_of(rows, context, block_size, SamplingParams(max_tokens=4000, ignore_eos=True, **MIXES[mix]))
    builder = InputBuilder(block_size, torch.device("cpu"))
    logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))
    taken: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(steps + 2):
        inputs = one_step(batcher, builder, logits, taken)
    ours = {part: 1e6 * median(values[2:]) for part, values in taken.items()}
    look_s = median(timed(lambda: logits.numpy().max(), FLOOR_REPEATS))
    floors = {"inputs": metadata_floor(inputs, rows), "sample": 1e6 * look_s}
    case = f"{mix} rows={rows} context={context}"
    results = [Result(case, part, "us", ours[part], limits=_floor(floors.get(part))) for part in PARTS]
    device = 1e6 * (LLAMA_8B_BYTES + rows * context * LLAMA_8B_KV_BYTES) / GPU_BYTES_PER_S
    host = sum(value for part, value in ours.items() if part != "sample")
    return [*results, Result(case, "all but sample", "us", host, limits={"8B step on a GPU": device})]


def batch_of(rows: int, context: int, block_size: int, params: SamplingParams) -> Batcher:
    """A batcher with `rows` waiting prompts and room for all of them in one step."""
    pool = BlockPool(rows * (context // block_size + 16))
    batcher = Batcher(pool, block_size, rows, rows * context, 2 * context + 5000, {2})
    root = root_key("bench", BlockGeometry(1, 1, 64, block_size, "bfloat16"))
    rng = np.random.default_rng(0)
    for i in range(rows):
        prompt = rng.integers(3, VOCAB, context).tolist()
        batcher.add(0.0, Request(f"r{i}", prompt, context, params, float(i), root))
    return batcher


def one_step(batcher: Batcher, builder: InputBuilder, logits: torch.Tensor, taken: dict[str, list[float]]) -> Inputs:
    """Runs one step: the prompts first, decodes afterwards."""
    times = [time.perf_counter()]

    def lap(value: Any) -> Any:
        times.append(time.perf_counter())
        return value

    step = lap(batcher.schedule(0.0))
    rows = lap([row_of(row, (2,)) for row in step.rows])
    inputs: Inputs = lap(builder.build(rows))
    tokens = lap(sample(logits, [rows[i].sample for i in inputs.order]))
    lap(batcher.commit(0.0, step, [[token.token_id] for token in tokens]))
    for part, begin, end in zip(PARTS, times, times[1:], strict=False):
        taken[part].append(end - begin)
    return inputs


def metadata_floor(inputs: Inputs, rows: int) -> float:
    """Microseconds to copy the step's metadata once and to make one empty call per row."""
    batch = inputs.batch
    tensors = (inputs.token_ids, batch.positions, batch.slot_mapping, inputs.last_rows, batch.block_tables)
    source = np.zeros(sum(tensor.nbytes for tensor in tensors), dtype=np.uint8)
    target = np.empty_like(source)

    def least() -> None:
        np.copyto(target, source)
        for _ in range(rows):
            _nothing()

    return 1e6 * median(timed(least, FLOOR_REPEATS))


def _nothing() -> None:
    pass


def _floor(value: float | None) -> dict[str, float]:
    return {} if value is None else {"floor": value}
