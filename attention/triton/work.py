"""Cuts a ragged batch into equal pieces of work, on the device.

The host needs the grid before it knows the lengths that decide it. (In a CUDA graph the lengths change from replay to
replay, and reading them back would stall the pipeline.) So all lengths are cut into pieces of one common size, and the
grid is an upper bound for any lengths:

    chunk     = max(ceil(total length / wanted pieces), min_chunk), rounded up to `align`
    pieces_s  = max(1, ceil(length_s / chunk))
    sum_s pieces_s <= requests + total / chunk <= requests + wanted pieces

All pieces have the same length, so a batch of one long and many short requests fills the device as evenly as a batch of
equal requests. Programs beyond the last piece find request -1 and exit.

Decode cuts contexts into splits (the number of processors gives the wanted pieces). Prefill cuts chunks of queries into
tiles (with a fixed chunk, so it wants as many pieces as possible).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.paging import first_key

METADATA = ["tables", "ctx_lens", "cu_q", "first_piece", "request", "chunk", "chunk_out"]
"""int32 arguments whose addresses shift with the number of decodes in the step: a kernel compiled for their alignment
would be compiled again in the middle of serving."""

UNBOUNDED = 1 << 30
"""As many pieces as possible: the chunk is min_chunk."""


@dataclass(slots=True)
class Work:
    """Pieces in the order of their requests. Piece i is number i - first_piece[request] of its request."""

    first_piece: Tensor  # [S + 1] int32
    request: Tensor  # [num_pieces] int32; -1 = no piece
    chunk: Tensor  # [1] int32: tokens per piece

    @property
    def num_pieces(self) -> int:
        """The grid: an upper bound on the number of pieces."""
        return self.request.shape[0]


@triton.jit
def lengths(
    values: tl.tensor,
    s: tl.tensor,
    num_requests: tl.tensor,
    OFFSETS: tl.constexpr,
    ALIGN: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Lengths of requests s, 0 beyond the last: from offsets [S + 1], or from contexts without the keys outside the
    window."""
    held = s < num_requests
    value = tl.load(values + s, mask=held, other=0)
    if OFFSETS:
        length = tl.load(values + s + 1, mask=held, other=0) - value
    else:
        length = value - first_key(value - 1, ALIGN, WINDOW)
    return length


@triton.jit(
    do_not_specialize=["num_requests", "num_pieces", "wanted"], do_not_specialize_on_alignment=["values", *METADATA]
)
def cut_kernel(
    values: tl.tensor,  # [S + 1] offsets or [S] context lengths, int32
    first_piece: tl.tensor,  # [S + 1] int32, written
    request: tl.tensor,  # [num_pieces] int32, written
    chunk_out: tl.tensor,  # [1] int32, written
    num_requests: tl.tensor,
    num_pieces: tl.tensor,
    wanted: tl.tensor,
    OFFSETS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Grid (S,). Every program sums the whole batch (a few vector loads) and writes its own request's pieces."""
    me = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    total = 0
    for start in range(0, num_requests, WIDTH):
        total += tl.sum(lengths(values, start + lane, num_requests, OFFSETS, ALIGN, WINDOW))
    chunk = tl.maximum(tl.cdiv(total, wanted), MIN_CHUNK)
    chunk = tl.cdiv(chunk, ALIGN) * ALIGN

    begin = 0
    for start in range(0, me, WIDTH):
        s = start + lane
        pieces = tl.maximum(tl.cdiv(lengths(values, s, num_requests, OFFSETS, ALIGN, WINDOW), chunk), 1)
        begin += tl.sum(tl.where(s < me, pieces, 0))
    mine = lengths(values, me + lane * 0, num_requests, OFFSETS, ALIGN, WINDOW)
    end = begin + tl.maximum(tl.cdiv(tl.max(mine), chunk), 1)

    tl.store(first_piece + me, begin)
    for start in range(begin, end, WIDTH):
        tl.store(request + start + lane, me + lane * 0, mask=start + lane < end)
    if me == num_requests - 1:
        tl.store(first_piece + num_requests, end)
        tl.store(chunk_out, chunk)
        for start in range(end, num_pieces, WIDTH):
            tl.store(request + start + lane, lane * 0 - 1, mask=start + lane < num_pieces)


def cut(
    values: Tensor, num_requests: int, num_pieces: int, *, wanted: int, min_chunk: int, align: int, window: int
) -> Work:
    """values: int32 offsets [S + 1] of query rows, or context lengths [S]. num_pieces: the bound of this module."""
    whole = torch.empty(num_requests + 2 + num_pieces, dtype=torch.int32, device=values.device)
    chunk, first_piece, request = whole.split([1, num_requests + 1, num_pieces])
    cut_kernel[(num_requests,)](
        values,
        first_piece,
        request,
        chunk,
        num_requests,
        num_pieces,
        wanted,
        OFFSETS=values.shape[0] == num_requests + 1,
        MIN_CHUNK=min_chunk,
        ALIGN=align,
        WINDOW=window,
        WIDTH=256,
        num_warps=4,
    )
    return Work(first_piece, request, chunk)
