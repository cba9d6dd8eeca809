"""Predictions of a bfloat16 model behind a prefix: in an arena of 16 bit or quantized, and behind quantized copies.
The copies went through a quantized pool or, quantized, to another node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention.choice.choose import choose
from attention.codes import POOL_DTYPES, pool_in
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry, encodings, pool_encodings
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.quantized_weights import load_quantized
from engine.checkpoint.weights import load
from engine.model.decoder import Model
from engine.model.ops.choice import choose_ops
from engine.model.ops.quantized import products_of
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.step.inputs import InputBuilder, Row
from engine.step.runner import Runner
from lab.bench.quantization.quality import Answer

BLOCK = 16
ENCODINGS = encodings
POOL_ENCODINGS = pool_encodings
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def load_model(source: ModelSource, weight_dtype: str = "wide", dtype: torch.dtype = torch.bfloat16) -> Model:
    """Load the model to compute in `dtype`, with a backend that reads every kind of arena; `weight_dtype` as
    --weight-dtype."""
    backend = choose("auto", "cpu", source.config.head_size, encodings[0])
    wide = weight_dtype == "wide"
    weights: dict[str, Any] = load(source, dtype) if wide else load_quantized(source, weight_dtype, dtype)
    ops = choose_ops(backend.name, "cpu", dtype, products=products_of(weights.values()))
    return Model(source.config, weights, backend, "cpu", ops)


class Prefixes:
    """Half of the blocks hold the computed prefix, the other half the working copy of an answer."""

    def __init__(self, model: Model, most_tokens: int, kv_dtype: str = "bfloat16") -> None:
        """kv_dtype: type of the arena."""
        config = model.config
        self._model = model
        self._shape = BlockGeometry(config.num_layers, config.num_kv_heads, config.head_size, BLOCK, kv_dtype)
        self._blocks = -(-most_tokens // BLOCK)
        self._bytes = torch.zeros(2 * self._blocks, self._shape.block_bytes, dtype=torch.uint8)
        self._kv = pool_in(self._bytes.flatten(), self._shape.shape, kv_dtype)
        self._runner = Runner(model, self._kv, BLOCK)
        self._prefix: list[int] = []

    def geometry(self, pool_dtype: str = "") -> BlockGeometry:
        return replace(self._shape, pool_dtype=pool_dtype)

    def compute(self, tokens: Sequence[int]) -> None:
        """Compute the prefix of the following answers: whole blocks."""
        self._prefix = list(tokens)
        self._runner.step([Row(self._prefix, 0, range(self._blocks))])

    def computed(self) -> Tensor:
        """The blocks of the prefix [blocks, block_bytes] uint8."""
        return self._bytes[: len(self._prefix) // BLOCK]

    def answer(self, window: Sequence[int], new_tokens: int, pool_dtype: str = "") -> Answer:
        """`window` begins with the prefix; pool_dtype: the type that its blocks are converted to and back, "" = no
        conversion. Its last block is computed again, because its logits are needed."""
        found = (len(self._prefix) - 1) // BLOCK
        blocks = range(self._blocks, 2 * self._blocks)
        for source, target in zip(range(found), blocks, strict=False):
            if pool_dtype:
                self._converted(self._kv[source], self.geometry(pool_dtype), self._kv[target])
            else:
                self._bytes[target] = self._bytes[source]
        losses, best = self._score(window, found * BLOCK, blocks)
        return Answer(losses, best, self._generate([], found * BLOCK, blocks, new_tokens))

    def answer_elsewhere(self, window: Sequence[int], new_tokens: int, wire_dtype: str, exact: Answer) -> Answer:
        """The same on a decode node that received all blocks of the prefix in `wire_dtype`. The first token is that of
        `exact`, because the prefill node computes it before the conversion."""
        start, blocks = len(self._prefix), range(self._blocks, 2 * self._blocks)
        for source, target in zip(range(start // BLOCK), blocks, strict=False):
            self._converted(self._kv[source], self.geometry(wire_dtype), self._kv[target])
        losses, best = self._score(window, start, blocks)
        generated = self._generate(exact.generated[:1], start, blocks, new_tokens)
        return Answer(exact.losses[:1] + losses, exact.best[:1] + best, generated)

    def _converted(self, block: Tensor, pooled: BlockGeometry, out: Tensor) -> None:
        encoded, dtype = torch.empty(pooled.pool_bytes, dtype=torch.uint8), POOL_DTYPES[pooled.pool_dtype]
        encode_block(block, dtype, encoded)
        decode_block(encoded, dtype, out)

    def _score(self, window: Sequence[int], start: int, blocks: Sequence[int]) -> tuple[list[float], list[int]]:
        """Losses and best tokens of window[len(prefix):], from one step over the tokens from `start` on, with the KV
        before `start`."""
        inputs = InputBuilder(BLOCK, torch.device("cpu")).build([Row(window[start:-1], start, blocks)])
        first = max(start, len(self._prefix) - 1)
        places = torch.arange(first - start, len(window) - 1 - start)
        logits = self._model.forward(inputs.token_ids, inputs.batch, self._kv, places)
        wanted = torch.tensor(window[first + 1 :])
        losses = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")
        return losses.tolist(), logits.argmax(-1).tolist()

    def _generate(self, said: Sequence[int], start: int, blocks: Sequence[int], count: int) -> list[int]:
        """`count` tokens after the prefix, which begin with `said`; `start`: where computing begins."""
        tokens = [*self._prefix, *said]
        while len(tokens) < len(self._prefix) + count:
            row = Row(tokens[start:], start, blocks, SamplingRow(GREEDY, tokens, len(self._prefix)))
            ((chosen,),) = self._runner.step([row])
            start = len(tokens)
            tokens.append(chosen.token_id)
        return tokens[len(self._prefix) :]

    def conversion_seconds(self, pool_dtype: str, rounds: int = 5) -> tuple[float, float]:
        """Seconds per block for encoding and for decoding: the best of `rounds` rounds over the prefix's blocks."""
        dtype, count = POOL_DTYPES[pool_dtype], max(1, len(self._prefix) // BLOCK)
        codes = torch.empty(count, self.geometry(pool_dtype).pool_bytes, dtype=torch.uint8)
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            for block in range(count):
                encode_block(self._kv[block], dtype, codes[block])
            middle = time.perf_counter()
            for block in range(count):
                decode_block(codes[block], dtype, self._kv[self._blocks + block])
            times.append((middle - begin, time.perf_counter() - middle))
        return min(t[0] for t in times) / count, min(t[1] for t in times) / count
