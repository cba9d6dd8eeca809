"""A context many times the arena gives the tokens of a large arena, with every backend of the CPU and a tier of slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from attention.choice.choose import made
from engine.beyond.lodged import Memory
from engine.beyond.window import Reader
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.step.cold import Cold
from engine.step.inputs import Row
from engine.step.runner import Runner
from tests.engine.tiny_llama import BLOCK_SIZE, runner, tiny

PROMPT, OUTPUT = 400, 12
ARENA = 8  # blocks: 128 tokens, of which half are for others


@dataclass
class Room:
    """An engine.step.cold.Lodged over plain memory."""

    memory: Memory
    stored: list[int] = field(default_factory=list)

    def read(self, slots, window, layers):
        return self.memory.reader.read(slots, window, layers)

    def store(self, block_id, slot):
        self.stored.append(slot)
        return self.memory.store(block_id, slot)

    def name(self, key, slot, block_checksum, facts):
        pass

    def ran(self, tokens, cold_blocks, seconds):
        pass

    def close(self):
        pass


def tokens_of(ours: Runner, cold: Cold | None, chunk: int, prompt: list[int], computed: int = 0) -> list[int]:
    """Greedy tokens; with `cold` a request beyond memory, else one whose blocks are the first of the arena."""
    known, found = list(prompt), []
    blocks = list(range(len(ours.kv_pool)))
    while len(found) < OUTPUT:
        count = min(chunk, len(known) - computed)
        last = computed + count == len(known)
        sample = SamplingRow(SamplingParams(temperature=0.0), known, len(prompt), eos_ids=()) if last else None
        row = Row(known[computed : computed + count], computed, blocks, sample)
        (chosen,) = ours.step([row]) if cold is None else [beyond(ours, row, cold)]
        computed += count
        if last:
            found.append(chosen[0].token_id)
            known.append(found[-1])
    return found


def beyond(ours: Runner, row: Row, cold: Cold) -> list:
    """All layers at once, or two of the three and then the third."""
    turns = [range(3)] if row.start // BLOCK_SIZE % 2 else [range(2), range(2, 3)]
    for layers in turns:
        chosen = ours.step_beyond(row, cold, layers)
        ends = layers.stop == 3
        assert (cold.hidden is None) == ends and bool(chosen) <= ends
        cold.passed(0 if ends else len(row.token_ids), layers.stop % 3)
    return chosen


def rows_of(pool: torch.Tensor) -> np.ndarray:
    return pool.view(torch.uint8).numpy().reshape(pool.shape[0] * pool.shape[1], -1)


@pytest.fixture(params=["torch", "cpu", "reference"])
def backend(request) -> str:
    try:
        made(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


@pytest.mark.parametrize(("hot", "window"), [(3, 1), (2, 2)])
def test_a_tiny_llama(backend, hot, window):
    theirs = tiny(bias=True)
    prompt = [3 + i * 7 % 200 for i in range(PROMPT)]
    right = tokens_of(runner(theirs, backend, num_blocks=32), None, 64, prompt)
    small = runner(theirs, backend, num_blocks=ARENA)
    slots = torch.full((40, *small.kv_pool.shape[1:]), torch.nan)
    tier, arena = rows_of(slots), rows_of(small.kv_pool)
    reader = Reader(tier, arena, small.kv_pool.shape[1])
    room = Room(Memory(tier, arena, reader, arena.shape[1] * small.kv_pool.shape[1], checksums=True))
    try:
        cold = Cold(hot, window, BLOCK_SIZE, 3)
        order = np.random.default_rng(1).permutation(40).tolist()
        cold.lodge(room, (), order)
        cold.seat([5, 0, 7, 2, 6, 3][: hot + window])
        assert tokens_of(small, cold, cold.chunk_tokens, prompt) == right
        assert len(cold.slots) == -(-(PROMPT + OUTPUT - 1) // BLOCK_SIZE) - hot
        untouched = [block for block in range(ARENA) if block not in cold.hot + cold.free + cold.window]
        assert small.kv_pool[untouched].isnan().all(), "it stays within its blocks"

        again = Cold(hot, window, BLOCK_SIZE, 3)  # most of the prompt is in the tier already
        again.lodge(room, cold.slots[:20], cold.slots[20:])
        again.seat([1, 4, 5, 0, 7][: hot + window])
        assert tokens_of(small, again, 17, prompt, computed=20 * BLOCK_SIZE) == right
    finally:
        reader.close()


def test_the_first_tokens_need_no_tier():
    theirs = tiny()
    prompt = [3 + i * 5 % 200 for i in range(30)]
    right = tokens_of(runner(theirs, num_blocks=8), None, 64, prompt)
    small = runner(theirs, num_blocks=ARENA)
    tier, arena = rows_of(torch.zeros(1, *small.kv_pool.shape[1:])), rows_of(small.kv_pool)
    reader = Reader(tier, arena, small.kv_pool.shape[1])
    room = Room(Memory(tier, arena, reader, 1, checksums=False))
    try:
        cold = Cold(3, 1, BLOCK_SIZE, 3)
        cold.lodge(room, (), ())
        cold.seat(range(4))
        assert tokens_of(small, cold, 32, prompt) == right and not room.stored
    finally:
        reader.close()
