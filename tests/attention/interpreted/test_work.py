"""Cutting lengths into pieces on the device."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from attention.triton.work import UNBOUNDED, Work, cut
from tests.attention.interpreted.cases import DEVICE


def pieces_of(work: Work) -> list[int]:
    """How many pieces every request got; checks that the pieces stand in order and that the rest is marked."""
    first, request = work.first_piece.tolist(), work.request.tolist()
    assert first[0] == 0
    for s in range(len(first) - 1):
        assert request[first[s] : first[s + 1]] == [s] * (first[s + 1] - first[s])
    assert set(request[first[-1] :]) <= {-1}
    return [end - start for start, end in pairwise(first)]


@pytest.mark.parametrize("seed", range(6))
def test_contexts_are_cut_evenly_within_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    lens = [rng.choice([0, 1, 17, 500, rng.randrange(100_000)]) for _ in range(rng.choice([1, 2, 40]))]
    wanted, align, window = rng.choice([1, 5, 200]), rng.choice([16, 64]), rng.choice([0, 1000])
    values, bound = torch.tensor(lens, dtype=torch.int32, device=DEVICE), len(lens) + wanted
    work = cut(values, len(lens), bound, wanted=wanted, min_chunk=2 * align, align=align, window=window)

    chunk = int(work.chunk)
    assert chunk % align == 0 and chunk >= 2 * align
    read = [n - (max(n - window, 0) // align * align if window else 0) for n in lens]
    assert pieces_of(work) == [max(1, -(-n // chunk)) for n in read]
    assert chunk <= max(2 * align, sum(read) / wanted + align + 1), "no longer than it has to be"


def test_queries_are_cut_at_a_fixed_chunk() -> None:
    q_lens = [42, 43, 0, 1, 200]
    offsets = torch.tensor([7, *(7 + torch.tensor(q_lens).cumsum(0))], dtype=torch.int32, device=DEVICE)
    bound = len(q_lens) + sum(q_lens) // 42
    work = cut(offsets, len(q_lens), bound, wanted=UNBOUNDED, min_chunk=42, align=1, window=0)
    assert int(work.chunk) == 42
    assert pieces_of(work) == [1, 2, 1, 1, 5]


def test_more_requests_than_one_vector_holds() -> None:
    lens = torch.arange(300, dtype=torch.int32, device=DEVICE)
    work = cut(lens, 300, 364, wanted=64, min_chunk=16, align=16, window=0)
    assert pieces_of(work) == [max(1, -(-n // int(work.chunk))) for n in range(300)]
