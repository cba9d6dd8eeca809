"""One step: rows of tokens in, chosen tokens out. Ragged batch -> tensors -> model -> sampler.

The metadata is built in numpy inside one buffer and moves to the device in one copy. A blocking call, meant for the
node's one executor thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.interface import RaggedBatch
from engine.model import Model
from engine.sampler import Sampled, SamplingRow, sample

TABLE_ALIGN = 16
"""Block tables are padded to a multiple of this many entries, so that kernels may load them in vectors."""


@dataclass(slots=True)
class Row:
    """One request's part of a step."""

    token_ids: Sequence[int]  # computed in this step; their KV goes to positions start, start + 1, ...
    start: int  # tokens of this request whose KV is in its blocks already
    block_ids: Sequence[int]  # of the request, in order; enough for start + len(token_ids) tokens
    sample: SamplingRow | None = None  # set: choose the token that follows the last of token_ids


@dataclass(slots=True)
class StepTime:
    """How long a step took and what it did, in the terms of the cost models (sched/cost.py)."""

    seconds: float
    num_decodes: int
    decode_context: int  # sum of the decodes' KV lengths, tokens
    prefill_tokens: int
    prefill_pairs: int  # sum of n (n + 2 past) over the chunks: twice the (query, key) pairs attended


@dataclass(slots=True)
class Inputs:
    """A step's tensors on the device, decodes first."""

    token_ids: Tensor  # [T] int64
    batch: RaggedBatch
    last_rows: Tensor  # [R] int64: the rows of q whose logits are wanted
    order: list[int]  # request s of the batch is rows[order[s]]


class Runner:
    """Runs the model over a KV pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]."""

    def __init__(self, model: Model, kv_pool: Tensor, block_size: int, device: str = "cpu") -> None:
        config = model.config
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_size)
        if kv_pool.dim() != 6 or tuple(kv_pool.shape[1:]) != shape:
            raise ValueError(f"the KV pool must be [num_blocks, {', '.join(map(str, shape))}], is {[*kv_pool.shape]}")
        self.model, self.kv_pool, self.block_size, self.device = model, kv_pool, block_size, torch.device(device)
        self.last: StepTime | None = None
        self.beside: Callable[[Sequence[Row]], AbstractContextManager[Any]] = nullcontext
        """Entered around the forward pass with its rows: how other ranks compute the same (RankProcesses.step)."""

    def follow(self, rows: Sequence[Row]) -> None:
        """As another rank: compute what rank 0 computes. Which tokens are chosen is its business."""
        inputs = build_inputs(rows, self.block_size, self.device)
        self.model.forward(inputs.token_ids, inputs.batch, self.kv_pool, inputs.last_rows)

    def step(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None = None) -> list[Sampled | None]:
        """Compute every row's KV and choose a token for those that have `sample`; results in the order of `rows`.

        on_layer(l): see Model.forward. Raises ValueError on a row without tokens or with too few blocks.
        """
        if not rows:
            return []
        began = time.perf_counter()
        inputs = build_inputs(rows, self.block_size, self.device)
        with self.beside(rows):
            logits = self.model.forward(inputs.token_ids, inputs.batch, self.kv_pool, inputs.last_rows, on_layer)
        sampled_rows = [i for i in inputs.order if rows[i].sample is not None]
        chosen = sample(logits, [row.sample for row in (rows[i] for i in sampled_rows) if row.sample is not None])
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # without a sampled row nothing has waited for the device yet
        self.last = _step_time(inputs.batch, time.perf_counter() - began)
        results: list[Sampled | None] = [None] * len(rows)
        for i, token in zip(sampled_rows, chosen, strict=True):
            results[i] = token
        return results


def build_inputs(rows: Sequence[Row], block_size: int, device: torch.device) -> Inputs:
    """The ragged batch of `rows`, one-token rows first, otherwise in their order."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids) != 1)
    q_lens = np.array([len(rows[i].token_ids) for i in order], dtype=np.int64)
    starts = np.array([rows[i].start for i in order], dtype=np.int64)
    kv_lens = starts + q_lens
    num_blocks = -(-kv_lens // block_size)
    _check(rows, order, q_lens, num_blocks)
    num_requests, num_tokens = len(order), int(q_lens.sum())
    width = -(-int(num_blocks.max()) // TABLE_ALIGN) * TABLE_ALIGN
    wanted = np.array([rows[i].sample is not None for i in order])

    # The int64 part, then the int32 part, each cut into its arrays.
    sizes = (num_tokens, num_tokens, num_tokens, int(wanted.sum()))
    sizes32 = (num_requests + 1, num_requests, num_requests * width)
    num_int64 = sum(sizes)
    buffer = np.zeros(num_int64 + -(-sum(sizes32) // 2), dtype=np.int64)
    token_ids, positions, slots, last_rows = np.split(buffer[:num_int64], np.cumsum(sizes)[:-1])
    cu_q, ctx_lens, tables, _ = np.split(buffer[num_int64:].view(np.int32), np.cumsum(sizes32))

    cu_q[1:] = np.cumsum(q_lens)
    ctx_lens[:] = kv_lens
    tables = tables.reshape(num_requests, width)
    used = np.arange(width) < num_blocks[:, None]
    tables[used] = _flatten((rows[i].block_ids[:n] for i, n in zip(order, num_blocks.tolist(), strict=True)))
    token_ids[:] = _flatten(rows[i].token_ids for i in order)
    request = np.repeat(np.arange(num_requests), q_lens)
    positions[:] = np.arange(num_tokens) + (starts - cu_q[:-1])[request]
    slots[:] = tables[request, positions // block_size].astype(np.int64) * block_size + positions % block_size
    last_rows[:] = (cu_q[1:] - 1)[wanted]

    moved = torch.from_numpy(buffer).to(device)
    token_ids_t, positions_t, slots_t, last_rows_t = moved[:num_int64].split(sizes)
    int32 = moved[num_int64:].view(torch.int32)[: sum(sizes32)]
    cu_q_t, ctx_lens_t, tables_t = int32.split(sizes32)
    batch = RaggedBatch(
        cu_q=cu_q_t,
        ctx_lens=ctx_lens_t,
        block_tables=tables_t.view(num_requests, width),
        slot_mapping=slots_t,
        positions=positions_t,
        num_decodes=int((q_lens == 1).sum()),
        block_size=block_size,
        q_lens=q_lens.tolist(),
        kv_lens=kv_lens.tolist(),
    )
    return Inputs(token_ids_t, batch, last_rows_t, order)


def _flatten(parts: Iterable[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(parts), dtype=np.int64)


def _check(rows: Sequence[Row], order: list[int], q_lens: np.ndarray, num_blocks: np.ndarray) -> None:
    for s, i in enumerate(order):
        if q_lens[s] == 0:
            raise ValueError(f"row {i} of the step has no tokens")
        if len(rows[i].block_ids) < num_blocks[s]:
            raise ValueError(f"row {i} of the step needs {num_blocks[s]} blocks, has {len(rows[i].block_ids)}")


def _step_time(batch: RaggedBatch, seconds: float) -> StepTime:
    decodes = batch.num_decodes
    chunks = list(zip(batch.q_lens[decodes:], batch.kv_lens[decodes:], strict=True))
    return StepTime(
        seconds=seconds,
        num_decodes=decodes,
        decode_context=sum(batch.kv_lens[:decodes]),
        prefill_tokens=sum(n for n, _ in chunks),
        prefill_pairs=sum(n * (2 * kv_len - n) for n, kv_len in chunks),
    )
