"""A model in bfloat16, one prefix of it, and what it says behind that prefix: over an arena of 16 bit or quantized, and
behind blocks that went through a quantized pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention import choose
from attention.codes import DTYPES, pool_in
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry, encodings
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.weights import load
from engine.model.decoder import Model
from engine.model.ops_choice import choose_ops
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.step.inputs import InputBuilder, Row
from engine.step.runner import Runner
from lab.bench.quantization.quality import Answer

BLOCK = 16
POOL_DTYPES = encodings
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def load_model(source: ModelSource) -> Model:
    """In bfloat16, with a backend that reads every kind of arena."""
    backend = choose("auto", "cpu", source.config.head_size, encodings[0])
    dtype = torch.bfloat16
    return Model(source.config, load(source, dtype), backend, "cpu", choose_ops(backend.name, "cpu", dtype))


class Prefixes:
    """Half of the blocks hold the prefix as it was computed, the other half what an answer works with."""

    def __init__(self, model: Model, most_tokens: int, kv_dtype: str = "bfloat16") -> None:
        """kv_dtype: of the arena."""
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
        """The prefix of the answers that follow."""
        self._prefix = list(tokens)
        self._runner.step([Row(self._prefix, 0, range(self._blocks))])

    def answer(self, window: Sequence[int], new_tokens: int, pool_dtype: str = "") -> Answer:
        """`window` begins with the prefix; pool_dtype: what its blocks go through, "" = they stay as they are. Its last
        block is computed again: the logits behind it are wanted."""
        found = (len(self._prefix) - 1) // BLOCK
        blocks = range(self._blocks, 2 * self._blocks)
        for source, target in zip(range(found), blocks, strict=False):
            if pool_dtype:
                self._through_pool(self._kv[source], pool_dtype, self._kv[target])
            else:
                self._bytes[target] = self._bytes[source]
        losses, best = self._score(window, found * BLOCK, blocks)
        return Answer(losses, best, self._generate(found * BLOCK, blocks, new_tokens))

    def _through_pool(self, block: Tensor, pool_dtype: str, out: Tensor) -> None:
        encoded = torch.empty(self.geometry(pool_dtype).pool_bytes, dtype=torch.uint8)
        encode_block(block, DTYPES[pool_dtype], encoded)
        decode_block(encoded, DTYPES[pool_dtype], out)

    def _score(self, window: Sequence[int], start: int, blocks: Sequence[int]) -> tuple[list[float], list[int]]:
        """Losses and best tokens for window[len(prefix):], one step over what follows `start`."""
        inputs = InputBuilder(BLOCK, torch.device("cpu")).build([Row(window[start:-1], start, blocks)])
        places = torch.arange(len(self._prefix) - 1 - start, len(window) - 1 - start)
        logits = self._model.forward(inputs.token_ids, inputs.batch, self._kv, places)
        wanted = torch.tensor(window[len(self._prefix) :])
        losses = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")
        return losses.tolist(), logits.argmax(-1).tolist()

    def _generate(self, start: int, blocks: Sequence[int], count: int) -> list[int]:
        tokens = list(self._prefix)
        while len(tokens) < len(self._prefix) + count:
            row = Row(tokens[start:], start, blocks, SamplingRow(GREEDY, tokens, len(self._prefix)))
            ((chosen,),) = self._runner.step([row])
            start = len(tokens)
            tokens.append(chosen.token_id)
        return tokens[len(self._prefix) :]

    def conversion_seconds(self, pool_dtype: str, rounds: int = 5) -> tuple[float, float]:
        """Per block, encoding and decoding: the best of some rounds over the prefix's blocks."""
        dtype, count = DTYPES[pool_dtype], max(1, len(self._prefix) // BLOCK)
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
