"""Paged decode over latent rows: one query row per request and head, the context split over many programs.

    out[s, h] = sum_j softmax_j(scale q[s, h] . row_j) row_j[: RANK],   j < ctx_lens[s]

All heads share the rows, so a program takes up to ROWS heads of a request, and reads each row of its split once for all
of them; with more heads, the programs of the same split are neighbours in the launch, so the second one finds the rows
in the second-level cache. Splits and their merge are those of attention/triton/decode.py.

DeepSeek-V3 in bfloat16: 128 heads do 278,528 floating-point operations on the 1,152 bytes of a row, 242 per byte, close
to what an H100 can do while it reads a byte (about 295). Decode with a latent is bound by arithmetic as much as by
memory. We have not measured this kernel on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import pointed
from attention.triton.decode import merge_kernel
from attention.triton.latent_rows import attend_rows
from attention.triton.latent_tiles import LatentGeometry
from attention.triton.paging import locate
from attention.triton.tiles import Tile
from attention.triton.work import METADATA, Work, cut


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=METADATA)
def latent_decode_kernel(
    q: tl.tensor,  # [S, NUM_HEADS, RANK + ROPE], last axis dense
    kv: tl.tensor,  # [num_blocks, 1, 1, BLOCK_SIZE, RANK + ROPE], dense within a block
    out: tl.tensor,  # [S, NUM_HEADS, RANK], written for requests of one split
    parts: tl.tensor,  # [pieces, NUM_HEADS, RANK] float32, written for the others
    lse: tl.tensor,  # [pieces, NUM_HEADS] float32, log2
    tables: tl.tensor,  # [S, max_blocks] int32
    ctx_lens: tl.tensor,  # [S] int32
    first_piece: tl.tensor,  # [S + 1] int32
    request: tl.tensor,  # [pieces] int32
    chunk: tl.tensor,  # [1] int32
    scale: tl.tensor,
    q_row: tl.tensor,  # strides, elements
    q_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,  # heads per program, >= 16
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (ceil(NUM_HEADS / ROWS), pieces)."""
    piece = tl.program_id(1)
    s = tl.load(request + piece)
    if s < 0:
        return
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r, p = tl.arange(0, R), tl.arange(0, P)
    held = (head < NUM_HEADS)[:, None]
    mine = held & (r < RANK)[None, :]

    first, last = tl.load(first_piece + s), tl.load(first_piece + s + 1)
    ctx_len = tl.load(ctx_lens + s)
    tokens = tl.load(chunk)
    start = (piece - first) * tokens
    end = tl.minimum(start + tokens, ctx_len)

    query = q + s.to(tl.int64) * q_row + head[:, None] * q_head
    q_tile = tl.load(query + r[None, :], mask=mine, other=0.0)
    q_rope = tl.load(query + RANK + p[None, :], mask=held & (p < ROPE)[None, :], other=0.0)
    newest = tl.zeros([ROWS], tl.int32) + (end - 1)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R], tl.float32)
    table = tables + s.to(tl.int64) * table_stride
    # Addresses are loaded one turn ahead: see attention/triton/decode.py.
    at = locate(table, start, end, block_stride, RANK + ROPE, BLOCK_SIZE, KEYS)
    for token in range(start, end, KEYS):
        next_at = locate(table, token + KEYS, end, block_stride, RANK + ROPE, BLOCK_SIZE, KEYS)
        top, total, acc = attend_rows(
            q_tile, q_rope, newest, top, total, acc, kv, at, token, end, scale,
            RANK, ROPE, R, P, BLOCK_SIZE, CODES, KEYS, True, PRECISION,
        )  # fmt: skip
        at = next_at

    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    if last - first == 1:
        place = out + s.to(tl.int64) * out_row + head[:, None] * out_head + r[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=mine)
    else:
        row = piece.to(tl.int64) * NUM_HEADS + head
        tl.store(parts + row[:, None] * RANK + r[None, :], acc, mask=mine)
        tl.store(lse + row, top + tl.log2(total), mask=head < NUM_HEADS)


def plan_latent_decode(ctx_lens: Tensor, geometry: LatentGeometry, tile: Tile, processors: int) -> Work:
    """Splits for ctx_lens [S] int32; `processors`: the number of programs that the device runs at the same time."""
    wanted = triton.cdiv(processors, triton.cdiv(geometry.num_heads, geometry.rows(tile.rows)))
    bound = ctx_lens.shape[0] + wanted
    return cut(ctx_lens, ctx_lens.shape[0], bound, wanted=wanted, min_chunk=tile.min_chunk, align=tile.keys, window=0)


def latent_decode(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    tables: Tensor,
    ctx_lens: Tensor,
    work: Work,
    scale: float,
    tile: Tile,
    geometry: LatentGeometry,
) -> None:
    """q [S, num_heads, row]; kv [num_blocks, 1, 1, block_size, row]; out [S, num_heads, rank]; tables [S, blocks]."""
    rows, constants = geometry.rows(tile.rows), geometry.constants()
    parts = torch.empty((work.num_pieces, *out.shape[1:]), dtype=torch.float32, device=q.device)
    lse = torch.empty(parts.shape[:2], dtype=torch.float32, device=q.device)
    latent_decode_kernel[(triton.cdiv(geometry.num_heads, rows), work.num_pieces)](
        q,
        pointed(kv),
        out,
        parts,
        lse,
        tables,
        ctx_lens,
        work.first_piece,
        work.request,
        work.chunk,
        scale,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv.stride(0),
        tables.stride(0),
        ROWS=rows,
        KEYS=tile.keys,
        PRECISION=tile.precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants,
    )
    merge_kernel[(q.shape[0], geometry.num_heads)](
        out,
        parts,
        lse,
        lse,  # no sinks
        work.first_piece,
        out.stride(0),
        out.stride(1),
        NUM_HEADS=geometry.num_heads,
        HEAD_SIZE=geometry.rank,
        D=constants["R"],
        WIDTH=16,
        SINKS=False,
        num_warps=4,
    )
