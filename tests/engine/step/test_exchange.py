"""KV that nodes with parts of one prompt exchange: a layer waits for what is before it, and for nothing else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from math import inf

import pytest
import torch

from engine.step.exchange import Exchange, ExchangeEnded
from engine.step.layer_blocks import from_bytes, layer_bytes, read_layer, write_layer
from engine.step.part import Stripes

BLOCKS = torch.zeros(2, 8, dtype=torch.uint8)


def exchange(index: int = 1, nodes: int = 3) -> Exchange:
    """Chunks of 32 tokens from token 32 on: those of the nodes 0, 1, 2, 0, 1, 2."""
    part = Stripes(0, 2, 2, 100, index=index, nodes=nodes)
    part.start(32, [32] * 6)
    return Exchange(part, lambda layer, row, blocks: None)


def test_a_chunk_begins_when_all_before_it_have_begun():
    e = exchange()
    assert e.begun_before(32) and not e.begun_before(64)
    e.add(0, 0, 32, 32, BLOCKS)
    assert e.begun_before(64) and not e.begun_before(160)
    e.add(2, 0, 96, 32, BLOCKS)
    e.add(0, 0, 128, 16, BLOCKS)
    assert not e.begun_before(160), "half of a chunk is missing"
    e.add(0, 0, 144, 16, BLOCKS)
    assert e.begun_before(160)


def test_take_returns_what_is_before_the_chunk_once():
    e = exchange()
    e.add(0, 0, 32, 32, BLOCKS)
    e.add(2, 0, 96, 32, BLOCKS + 1)
    assert [start for start, _ in e.take(0, 64)] == [32]
    assert e.take(0, 64) == []
    e.add(0, 0, 128, 32, BLOCKS)
    assert [start for start, _ in e.take(0, 160)] == [96, 128]


def test_the_engine_thread_waits_for_the_layer():
    e, waiting = exchange(), threading.Event()
    e.add(0, 0, 32, 32, BLOCKS)

    def compute() -> list[int]:
        e.take(0, 64)
        waiting.set()
        return [start for start, _ in e.take(1, 64)]

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(compute)
        waiting.wait()
        assert not found.done()
        e.add(0, 1, 32, 32, BLOCKS)
        assert found.result() == [32]
    assert e.waited_s > 0


def test_the_engine_thread_waits_no_longer_than_it_may():
    """Others come while it waits: it takes nothing, and what arrives later is there for the next step."""
    e, left, waiting = exchange(), [inf, 0.0], threading.Event()

    def left_s() -> float:
        waiting.set()
        return left[0]

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(e.take, 0, 64, left_s)
        waiting.wait()
        assert not found.done()
        del left[0]
        e.look_again()
        assert found.result() is None and e.waited_s > 0
        assert thread.submit(e.take, 0, 64, lambda: 0.0).result() is None
        e.add(0, 0, 32, 32, BLOCKS)
        assert [start for start, _ in thread.submit(e.take, 0, 64, lambda: 0.0).result()] == [32], "it need not wait"
        assert thread.submit(e.take, 1, 64, lambda: 0.0).result() is None


def test_an_end_wakes_the_engine_thread():
    e = exchange()
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(e.take, 0, 64)
        e.end()
        with pytest.raises(ExchangeEnded):
            found.result()
    with pytest.raises(ExchangeEnded):
        e.take(1, 32)


@pytest.mark.parametrize(
    ("node", "layer", "start", "count"),
    [(1, 0, 64, 32), (0, 2, 32, 32), (0, 0, 128, 32), (0, 0, 32, 64), (0, 0, 32, 0), (5, 0, 32, 32)],
)
def test_what_a_node_does_not_compute_next_is_refused(node, layer, start, count):
    with pytest.raises(ValueError, match=r"computes next|no part of a chunk"):
        exchange().add(node, layer, start, count, BLOCKS)


def test_only_nodes_with_a_later_chunk_need_what_is_new():
    e = exchange()
    assert e.needs(0, 64) and e.needs(0, 128) and not e.needs(0, 160)
    assert e.needs(2, 192) and not e.needs(2, 224) and not e.needs(1, 64)
    assert e.needed_behind(192) and not e.needed_behind(193)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_layer_of_blocks_moves_to_another_pool(dtype):
    made = torch.randint(0, 100, (6, 3, 2, 2, 4, 8))
    here, there = made.to(dtype), torch.zeros(8, 3, 2, 2, 4, 8).to(dtype)
    data = read_layer(here, 1, [4, 0])
    assert data.shape == (2, layer_bytes(here))
    write_layer(there, 1, [7, 2], from_bytes(there, memoryview(bytearray(data.numpy().tobytes())), 2))
    assert torch.equal(there[[7, 2], 1].float(), here[[4, 0], 1].float())
    assert not there[[7, 2], 0].float().any() and not there[0].float().any()
    with pytest.raises(ValueError, match="not a layer of 3 blocks"):
        from_bytes(there, memoryview(bytearray(data.numpy().tobytes())), 3)
