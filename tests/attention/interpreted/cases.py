"""Ragged batches over a poisoned pool, attention in any float type, and the error rule that all kernels are held to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.interface import RaggedBatch
from attention.reference import tokens_of
from attention.triton.tiles import Tile, Tiles

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
"""Where the kernels run: interpreted, or on a GPU by scripts/tools.py gpu-check."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

SMALL = Tiles(Tile(16, 16, 4, 2, min_chunk=32), Tile(32, 16, 4, 2))
"""Tiles so small that short requests make several turns, splits and query tiles."""

HEADS = ((4, 4), (9, 3), (8, 2), (6, 1))
"""(query heads, KV heads): MHA, SmolLM2's three per KV head, GQA, MQA."""

HEAD_SIZES, BLOCK_SIZES = (64, 80, 96, 128, 256), (16, 48, 64, 256)


def grid(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """(one of first, one of second, dtype): all of them on a GPU; interpreted, where each takes a second, every pair
    of two values at least once, and half of that without the heavy ones."""
    found = []
    for (i, a), (j, b), (k, dtype) in product(enumerate(first), enumerate(second), enumerate(DTYPES)):
        if DEVICE == "cuda" or k == (i + j) % len(DTYPES):
            found.append(pytest.param(a, b, dtype, marks=[pytest.mark.heavy] if (i + j) % 2 else []))
    return found


@dataclass(frozen=True)
class Case:
    """One step: queries, one layer's KV, and how the rows lie."""

    q: Tensor  # [T, num_heads, head_size]
    kv: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_size]: a layer of a pool, NaN where no token lies
    batch: RaggedBatch
    scale: float


def make_case(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """Rows of q_len 1 first. Every slot without a token, block 0 (which pads the tables) and the neighbouring layers
    hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in kv_lens]
    order = 1 + torch.randperm(sum(counts), generator=generator)
    tables = torch.zeros(len(kv_lens), max(counts, default=0) + 2, dtype=torch.int32)
    pool = torch.full((sum(counts) + 1, 3, 2, heads[1], block_size, head_size), torch.nan, dtype=kv_dtype or dtype)
    kv, slots, positions, taken = pool[:, 1], [], [], 0
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        blocks = order[taken : taken + counts[s]]
        tables[s, : counts[s]] = blocks.int()
        taken += counts[s]
        for j in range(kv_len):
            token = torch.randn(2, heads[1], head_size, generator=generator)
            kv[blocks[j // block_size], :, :, j % block_size] = token.to(pool.dtype)
        new = range(max(kv_len - q_len, 0), kv_len)
        slots += [int(blocks[j // block_size]) * block_size + j % block_size for j in new] + [-1] * (q_len - len(new))
        positions += [*new] + [0] * (q_len - len(new))
    batch = RaggedBatch(
        cu_q=torch.tensor([0, *torch.tensor(q_lens, dtype=torch.int64).cumsum(0)], dtype=torch.int32, device=DEVICE),
        ctx_lens=torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
        block_tables=tables.to(DEVICE),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        positions=torch.tensor(positions, dtype=torch.int64, device=DEVICE),
        num_decodes=sum(q_len == 1 for q_len in q_lens),
        block_size=block_size,
        q_lens=q_lens,
        kv_lens=kv_lens,
    )
    q = torch.randn(sum(q_lens), heads[0], head_size, generator=generator).to(DEVICE, dtype)
    return Case(q, pool.to(DEVICE)[:, 1], batch, head_size**-0.5)


def attend(
    case: Case,
    dtype: torch.dtype,
    window: int = 0,
    soft_cap: float = 0.0,
    backwards: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, in `dtype`, with window, soft cap and sinks; a request without keys gets zeros. backwards: every
    sum in the opposite order, with other roundings."""
    q, out, row = case.q.to(dtype), torch.zeros(case.q.shape, dtype=dtype, device=DEVICE), 0
    for s, (q_len, kv_len) in enumerate(zip(case.batch.q_lens, case.batch.kv_lens, strict=True)):
        if kv_len:
            k, v = tokens_of(case.kv, case.batch.block_tables[s], kv_len, dtype)
            group = q.shape[1] // k.shape[1]
            k, v, own = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), q[row : row + q_len]
            if backwards:
                k, own = k.flip(-1), own.flip(-1)
            scores = torch.einsum("qhd,khd->hqk", own, k) * case.scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            position = torch.arange(kv_len - q_len, kv_len, device=DEVICE)[:, None]
            key = torch.arange(kv_len, device=DEVICE)[None, :]
            hidden = (key > position) | (position - key >= (window or kv_len + 1))
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, q_len, 1)), -1)
            weights = scores.softmax(-1)[..., :kv_len]
            if backwards:
                weights, v = weights.flip(-1), v.flip(0)
            out[row : row + q_len] = torch.einsum("hqk,khd->qhd", weights, v)
        row += q_len
    return out


def plain(case: Case, window: int = 0, soft_cap: float = 0.0) -> Tensor:
    """`attend` in the dtype of the case, forwards or backwards: the one whose largest error is larger. One order alone
    is exact by luck on some CPU."""
    exact = attend(case, torch.float64, window, soft_cap)
    both = [attend(case, case.q.dtype, window, soft_cap, backwards) for backwards in (False, True)]
    return max(both, key=lambda found: float((found.double() - exact).abs().max()))


def assert_close(ours: Tensor, exact: Tensor, plain: Tensor) -> None:
    """|ours - exact| <= 2 |plain - exact| + eps, for the largest error and for the root mean square; `plain` is torch
    in our dtype, and eps the rounding of the result alone."""
    eps = torch.finfo(ours.dtype).eps / 2
    error, allowed = ours.double() - exact, plain.double() - exact
    if not error.numel():
        return
    assert error.isfinite().all()
    assert error.abs().max() <= 2 * allowed.abs().max() + eps * exact.abs().max()
    assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt() + eps * exact.square().mean().sqrt()


class Poisoned:
    """An output with sentinels on every side: around the rows, the heads and the head's elements."""

    SENTINEL = 12345.0

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        rows, heads, size = shape
        self._whole = torch.full((rows + 4, heads + 2, size + 16), self.SENTINEL, dtype=dtype, device=DEVICE)
        self.out = self._whole[2 : rows + 2, 1 : heads + 1, :size]
        self._inside = torch.zeros_like(self._whole, dtype=torch.bool)
        self._inside[2 : rows + 2, 1 : heads + 1, :size] = True

    def assert_untouched(self) -> None:
        expected = torch.tensor(self.SENTINEL, dtype=self._whole.dtype, device=DEVICE)
        assert (self._whole[~self._inside] == expected).all()
