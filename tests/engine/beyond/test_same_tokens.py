"""A context many times the arena gives the tokens of a large arena: every backend of the CPU, DRAM and SSD."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
import torch

from attention.choice.choose import made
from cache.ssd.medium import Entry
from engine.beyond import lodged
from engine.beyond.lodged import Damaged, Done, Memory, RequestRoom
from engine.beyond.window import Reader
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.step.cold import Cold, PartLate
from engine.step.inputs import Row
from engine.step.runner import Runner
from sched.beyond import ColdSteps
from tests.engine.tiny_llama import BLOCK_SIZE, runner, tiny

PROMPT, OUTPUT = 400, 12
ARENA = 8  # blocks: 128 tokens, of which half are for others


class Disk:
    """An SSD tier as a dict. `behind`: how many writes wait for later ones."""

    def __init__(self, behind: int = 0) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.reads, self.behind = 0, behind
        self.waiting: list[tuple[Future[Entry], bytes, memoryview, int]] = []

    def put(self, key, memory, block_checksum, facts):
        self.waiting.append((Future(), key, memory, block_checksum))
        written = self.waiting[-1][0]
        while len(self.waiting) > self.behind:
            future, key, memory, block_checksum = self.waiting.pop(0)
            self.blocks[key] = bytes(memory)
            future.set_result(Entry(0, block_checksum, len(memory))._replace(facts=key))
        return written

    def take(self, key, into):
        into[:] = self.blocks[key]
        return Entry(0, 1, len(into))._replace(facts=key)

    def read(self, entry, begin, into):
        self.reads += 1
        into[:] = self.blocks[entry.facts][begin : begin + len(into)]

    def close(self):
        self.blocks.clear()


class Slots:
    """A DRAM lodging that nobody shares."""

    def name(self, key, slot, block_checksum, facts):
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
    while turns:
        layers = turns.pop(0)
        try:
            chosen = ours.step_beyond(row, cold, layers)
        except PartLate as late:
            answered = Event()
            late.then(answered.set)
            answered.wait()
            cold.late(late.layer)
            border = layers.start + cold.most_layers
            turns[:0] = [part for part in (range(layers.start, border), range(border, layers.stop)) if part]
            continue
        ends = layers.stop == 3
        assert (cold.hidden is None) == ends and bool(chosen) <= ends
        cold.passed(0 if ends else len(row.token_ids), layers.stop % 3)
    return chosen


def memory_of(ours: Runner, num_slots: int) -> tuple[Reader, Memory]:
    """A DRAM tier full of NaN beside the arena."""
    slots = torch.full((num_slots, *ours.kv_pool.shape[1:]), torch.nan)
    arena = rows_of(ours.kv_pool)
    reader = Reader(arena, ours.kv_pool.shape[1])
    return reader, Memory(rows_of(slots), arena, reader, slots.flatten(0, 1), checksums=True)


def rows_of(pool: torch.Tensor) -> np.ndarray:
    return pool.view(torch.uint8).numpy().reshape(pool.shape[0] * pool.shape[1], -1)


@pytest.fixture(params=["torch", "cpu", "reference"])
def backend(request) -> str:
    try:
        made(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


@pytest.mark.parametrize(("hot", "window", "near", "behind"), [(3, 1, 40, 0), (2, 2, 7, 0), (2, 3, 0, 4)])
def test_a_tiny_llama(backend, hot, window, near, behind):
    theirs = tiny(bias=True)
    prompt = [3 + i * 7 % 200 for i in range(PROMPT)]
    right = tokens_of(runner(theirs, backend, num_blocks=32), None, 64, prompt)
    small = runner(theirs, backend, num_blocks=ARENA)
    reader, memory = memory_of(small, 40)
    room = RequestRoom(Slots(), disk := Disk(behind), memory, ColdSteps(), Done())
    try:
        cold = Cold(hot, window, BLOCK_SIZE, 3)
        order = np.random.default_rng(1).permutation(40)[:near].tolist()
        cold.lodge(room, (), [*order, *range(40, 80 - near)])
        cold.keys = [b"%d" % place for place in range(100)]
        cold.seat([5, 0, 7, 2, 6, 3][: hot + window])
        assert tokens_of(small, cold, cold.chunk_tokens, prompt) == right
        assert len(cold.slots) == -(-(PROMPT + OUTPUT - 1) // BLOCK_SIZE) - hot
        assert bool(disk.reads) == (near < 20), "the last blocks come through the window"
        untouched = [block for block in range(ARENA) if block not in cold.hot + cold.free + cold.window]
        assert small.kv_pool[untouched].isnan().all(), "it stays within its blocks"

        again = Cold(hot, window, BLOCK_SIZE, 3)  # most of the prompt is in the tier already
        del room._far[max(0, 20 - near) :]
        again.lodge(room, cold.slots[:20], [*order[20:], *range(40 + len(room._far), 80)])
        again.keys = cold.keys
        again.seat([1, 4, 5, 0, 7][: hot + window])
        assert tokens_of(small, again, 17, prompt, computed=20 * BLOCK_SIZE) == right
    finally:
        reader.close()


def test_a_block_is_read_from_its_copy_until_it_is_on_disk():
    """One of three was on disk before, with other rounding: what is there counts as soon as it is read."""
    reader, memory = memory_of(runner(tiny(), num_blocks=ARENA), 1)
    room = RequestRoom(Slots(), disk := Disk(behind=3), memory, ColdSteps(), Done())
    try:
        for block in range(3):
            memory.block(block)[:] = block + 1
            room.store(block, 1 + block, b"%d" % block)
        for block in range(3):
            memory.block(block)[:] = 99  # other requests have the blocks now

        def seen() -> list[int]:
            into = np.zeros(memory.arena.shape[1], np.uint8)
            found = []
            for place in range(3):
                room._fill(place, 2, into.data)
                assert (into == into[0]).all()
                found.append(int(into[0]))
            return found

        assert seen() == [1, 2, 3] and not disk.reads
        size = len(disk.waiting[0][2])
        disk.blocks[b"0"] = bytes([7]) * size
        disk.waiting.pop(0)[0].set_result(Entry(0, 1, size)._replace(facts=b"0"))
        disk.behind = 0
        room.store(5, 4, b"3")
        room.settle()
        assert seen() == [7, 2, 3] and disk.reads == 3
    finally:
        reader.close()


def test_the_model_waits_for_a_disk_that_is_far_behind(monkeypatch):
    reader, memory = memory_of(runner(tiny(), num_blocks=ARENA), 1)
    monkeypatch.setattr(lodged, "COPIED_BYTES", 2 * memory.block_bytes)
    room = RequestRoom(Slots(), disk := Disk(behind=9), memory, ColdSteps(), Done())
    try:
        room.store(0, 1, b"0")
        room.store(1, 2, b"1")
        with ThreadPoolExecutor(1) as engine:
            third = engine.submit(room.store, 2, 3, b"2")
            first, key, copy, checksum = disk.waiting[0]
            with pytest.raises(TimeoutError):
                third.result(0.05)
            disk.blocks[key] = bytes(copy)
            first.set_result(Entry(0, checksum, len(copy))._replace(facts=key))
            third.result(10)
        assert len(disk.waiting) == 3
    finally:
        reader.close()


def test_the_first_tokens_need_no_tier():
    theirs = tiny()
    prompt = [3 + i * 5 % 200 for i in range(30)]
    right = tokens_of(runner(theirs, num_blocks=8), None, 64, prompt)
    small = runner(theirs, num_blocks=ARENA)
    reader, memory = memory_of(small, 1)
    try:
        cold = Cold(3, 1, BLOCK_SIZE, 3)
        cold.lodge(RequestRoom(Slots(), None, memory, ColdSteps(), Done()), (), ())
        cold.seat(range(4))
        assert tokens_of(small, cold, 32, prompt) == right and not cold.slots
    finally:
        reader.close()


def test_a_block_that_was_changed_on_disk_is_never_computed_with():
    small = runner(tiny(), num_blocks=ARENA)
    reader, memory = memory_of(small, 1)
    room = RequestRoom(Slots(), disk := Disk(), memory, ColdSteps(), Done())
    try:
        small.kv_pool.zero_()
        cold = Cold(3, 1, BLOCK_SIZE, 3)
        cold.lodge(room, (), range(1, 40))
        cold.seat(range(4))
        cold.keys = [b"%d" % place for place in range(40)]
        prompt = list(range(3, 120))
        tokens_of(small, cold, 32, prompt)
        disk.blocks[b"1"] = bytes(len(disk.blocks[b"1"]))
        with pytest.raises(Damaged):
            small.step_beyond(Row([5], 117 + OUTPUT - 1, ()), cold, range(3))
    finally:
        reader.close()
