"""The copies of the CUDA device on CPU tensors; streams, events and page-locking are shown by scripts/tools.py
gpu-check."""

import random
from itertools import pairwise

import pytest
import torch

from engine.loading.cuda_memory import MIN_ROW_BYTES, CudaMemory, copy_in, copy_out, gathered
from net.transfer.device.memory import chunks

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
    rows, left = gathered(moves)
    if length is not None and len(moves) >= 4:
        assert len(rows) == (length >= MIN_ROW_BYTES) and (not left or not rows)
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


def gathered_bytes(moves):
    """The bytes that rows and pieces move: {(device, host)}."""
    rows, left = gathered(moves)
    moved = [
        (row * unit + i, at + k * unit + i) for unit, at, ks in rows for k, row in enumerate(ks) for i in range(unit)
    ]
    return sorted(moved + [(here + i, there + i) for here, there, length in left for i in range(length)])


def test_rows_lie_in_a_grid_and_side_by_side_in_host_memory():
    good = [(512 * i, 64 + 512 * i, 512) for i in (3, 0, 1, 2)]
    good = [(here, 64 + 512 * i, length) for i, (here, _, length) in enumerate(good)]
    assert gathered(good) == ([(512, 64, [3, 0, 1, 2])], [])
    assert gathered(good[:3]) == ([], good[:3]), "too few"
    apart = [*good, *((here + 4096, there + 4096, length) for here, there, length in good)]
    assert gathered(apart) == ([(512, 64, [3, 0, 1, 2]), (512, 4160, [11, 8, 9, 10])], []), "two runs in host memory"
    odd = [(13 * i, 13 * i, 13) for i in range(9)]
    assert gathered(odd) == ([], odd), "rows of a few bytes are no gain"


@pytest.mark.parametrize("row", [512, 3 * 1024, 36_864])
def test_one_gather_where_buffers_end_within_rows_and_neighbours_were_joined(row):
    """What staging makes of layers of scattered blocks: rows cut by the ends of its buffers, two neighbours in one."""
    rng = random.Random(row)
    numbers = rng.sample(range(0, 400, 3), 90)
    spans, there = [], 0
    for number in numbers:
        length = row * rng.choice([1, 1, 2])  # joined with its neighbour
        spans.append((number * row, there, length))
        there += length
    cut = chunks(spans, 20 * row + row // 3)
    assert len(cut) > 3
    for chunk in cut:
        moves = [(here, at, length) for here, at, _, length in chunk.pieces]
        rows, left = gathered(moves)
        assert len(rows) + len(left) <= 3, "not a copy for each"
        if row == 512:
            wanted = [(here + i, at + i) for here, at, length in moves for i in range(length)]
            assert gathered_bytes(moves) == sorted(wanted)


def test_a_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match="contiguous CUDA tensor"):
        CudaMemory(torch.zeros(8))
