"""The copies of the CUDA device on CPU tensors; streams, events and page-locking are shown by scripts/gpu_check.py."""

import random
from itertools import pairwise

import pytest
import torch

from engine.kv.cuda_memory import CudaMemory, copy_in, copy_out, rows_of

SIZE = 1 << 14


def moves_of(seed):
    """Layers of blocks in random order, or pieces of any size."""
    rng = random.Random(seed)
    print("seed", seed)
    if seed % 2:
        length = rng.choice([64, 256, 1024])
        rows = rng.sample(range(SIZE // length), rng.randint(1, SIZE // length))
        return [(row * length, 128 + i * length, length) for i, row in enumerate(rows)], length
    cuts = sorted(rng.sample(range(SIZE), 9))
    pieces = [(start, end - start) for start, end in pairwise(cuts)]
    rng.shuffle(pieces)
    return [(start, SIZE + start, length) for start, length in pieces], None


@pytest.mark.parametrize("seed", range(8))
def test_bytes_go_out_and_come_back(seed):
    moves, length = moves_of(seed)
    found = rows_of(moves, SIZE)
    assert (found is not None) == (length is not None and len(moves) >= 4)
    device = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    host, kept = torch.zeros(2 * SIZE + 128, dtype=torch.uint8), device.clone()
    copy_out(device, host, moves)
    for here, there, size in moves:
        assert torch.equal(host[there : there + size], device[here : here + size])
    assert int(host.count_nonzero()) <= sum(size for _, _, size in moves)
    assert torch.equal(device, kept)
    other = torch.zeros(SIZE, dtype=torch.uint8)
    copy_in(other, host, moves)
    expected = torch.zeros(SIZE, dtype=torch.uint8)
    for here, _, size in moves:
        expected[here : here + size] = device[here : here + size]
    assert torch.equal(other, expected)


def test_rows_need_one_length_alignment_and_a_contiguous_host_side():
    good = [(64 * i, 64 * i, 64) for i in range(4)]
    assert rows_of(good, 256) == (64, [0, 1, 2, 3])
    assert rows_of(good[:3], 256) is None
    assert rows_of([*good[:3], (193, 192, 64)], 256) is None
    assert rows_of([*good[:3], (192, 200, 64)], 256) is None
    assert rows_of([*good[:3], (192, 192, 32)], 256) is None
    assert rows_of(good, 250) is None


def test_a_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match="contiguous CUDA tensor"):
        CudaMemory(torch.zeros(8))
