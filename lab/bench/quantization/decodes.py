"""The time of a decode step over a 16-bit and over a quantized arena, if reading KV is a large part of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from attention.codes import pool_in
from cache.block import BlockGeometry
from engine.model.decoder import Model
from engine.step.runner import Row, Runner

BLOCK = 16


class Decodes:
    """Requests that have all computed the same tokens, each in its own blocks."""

    def __init__(self, model: Model, kv_dtype: str, tokens: Sequence[int], requests: int) -> None:
        config, each = model.config, len(tokens) // BLOCK + 1
        shape = BlockGeometry(config.num_layers, config.num_kv_heads, config.head_size, BLOCK, kv_dtype)
        memory = torch.zeros(requests, each * shape.block_bytes, dtype=torch.uint8)
        self._runner = Runner(model, pool_in(memory.flatten(), shape.shape, kv_dtype), BLOCK)
        self._runner.step([Row(list(tokens), 0, range(each))])
        memory[1:] = memory[0]
        self._rows = [Row([1], len(tokens), range(i * each, (i + 1) * each)) for i in range(requests)]

    def step_seconds(self) -> float:
        begin = time.perf_counter()
        self._runner.step(self._rows)
        return time.perf_counter() - begin
