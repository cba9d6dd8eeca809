"""Two ranks with a KV arena each, as on two GPUs: the tokens of one process, and whole blocks for other nodes.

The ranks are real processes with gloo between them (tests/e2e/split_ranks.py says what stands in for CUDA).
"""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.split_ranks import stand_in
from tests.e2e.test_device_arena import KV_BLOCKS, device_answers, plain_answers

BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, head size, float32


def test_blocks_of_ranks_that_keep_their_heads_apart_are_whole(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks prefill, one process decodes from the blocks that were pushed to it layer by layer. The first prompt's
    blocks are evicted, and come back from the store for a third request."""
    flags = [*tiny_model, "--served-model-name", "tiny", "--max-model-len", "128", "--max-num-seqs", "4"]
    flags += ["--kv-cache-bytes", "4M"]
    expected = asyncio.run(plain_answers(flags))
    devices = stand_in(monkeypatch)
    ranks = ["--kv-cache-bytes", str(KV_BLOCKS * BLOCK_BYTES), "--tensor-parallel-size", "2"]
    answers = asyncio.run(device_answers(flags, ranks, "push"))
    (device,) = devices
    assert device.pinned == [] and len(device.split.parts) == 2
    device.close()
    assert [text for text, _ in answers] == [*expected, expected[0]]
    assert [cached for _, cached in answers] == [0, 0, 96], "the first prompt's blocks came back from the pool"
    assert {direction for _, direction in device.log} == {"in", "out"}
