"""Chunked prefill over latent rows in a paged pool. The new tokens of a request attend to all cached rows and to one
another; attention is causal.

    out[i, h] = sum_{j <= p} softmax_j(scale q[i, h] . row_j) row_j[: RANK],   p = ctx_lens[s] - q_len[s] + i

A program owns ROWS queries, the heads of one token or of several (row r is token r // HEADS, head r % HEADS), and reads
each latent row once for all of them. Rows before the tile's first position are seen by every query and need no mask.
The order of programs is that of attention/triton/prefill.py. The rows of the chunk must be in the pool already.

We have not measured this kernel on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import pointed
from attention.triton.latent_rows import attend_rows
from attention.triton.latent_tiles import LatentGeometry
from attention.triton.paging import locate
from attention.triton.prefill import tile_shape
from attention.triton.tiles import Tile
from attention.triton.work import METADATA, UNBOUNDED, Work, cut


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=METADATA)
def latent_prefill_kernel(
    q: tl.tensor,  # [T, NUM_HEADS, RANK + ROPE], last axis dense
    kv: tl.tensor,  # [num_blocks, 1, 1, BLOCK_SIZE, RANK + ROPE], dense within a block
    out: tl.tensor,  # [T, NUM_HEADS, RANK], written
    tables: tl.tensor,  # [S, max_blocks] int32
    ctx_lens: tl.tensor,  # [S] int32
    cu_q: tl.tensor,  # [S + 1] int32: rows of q
    first_piece: tl.tensor,  # [S + 1] int32
    request: tl.tensor,  # [pieces] int32
    scale: tl.tensor,
    q_row: tl.tensor,  # strides, elements
    q_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,  # tokens per program
    HEADS: tl.constexpr,  # heads per program; QUERIES * HEADS <= ROWS
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (ceil(NUM_HEADS / HEADS), pieces)."""
    piece = tl.num_programs(1) - 1 - tl.program_id(1)
    s = tl.load(request + piece)
    if s < 0:
        return
    begin = tl.load(cu_q + s)
    q_len = tl.load(cu_q + s + 1) - begin
    query = (piece - tl.load(first_piece + s)) * QUERIES
    if query >= q_len:
        return
    m, r, p = tl.arange(0, ROWS), tl.arange(0, R), tl.arange(0, P)
    i = query + m // HEADS
    head = tl.program_id(0) * HEADS + m % HEADS
    held = ((i < q_len) & (head < NUM_HEADS) & (m < QUERIES * HEADS))[:, None]
    mine = held & (r < RANK)[None, :]

    past = tl.load(ctx_lens + s) - q_len
    position = past + i
    end = past + tl.minimum(query + QUERIES, q_len)
    row = (begin + i).to(tl.int64)
    place = q + row[:, None] * q_row + head[:, None] * q_head
    q_tile = tl.load(place + r[None, :], mask=mine, other=0.0)
    q_rope = tl.load(place + RANK + p[None, :], mask=held & (p < ROPE)[None, :], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R], tl.float32)
    table = tables + s.to(tl.int64) * table_stride

    diagonal = (past + query + 1) // KEYS * KEYS
    # Addresses are loaded one turn ahead: see attention/triton/prefill.py.
    at = locate(table, 0, end, block_stride, RANK + ROPE, BLOCK_SIZE, KEYS)
    for token in range(0, diagonal, KEYS):
        next_at = locate(table, token + KEYS, end, block_stride, RANK + ROPE, BLOCK_SIZE, KEYS)
        top, total, acc = attend_rows(
            q_tile, q_rope, position, top, total, acc, kv, at, token, end, scale,
            RANK, ROPE, R, P, BLOCK_SIZE, CODES, KEYS, False, PRECISION,
        )  # fmt: skip
        at = next_at
    at = locate(table, diagonal, end, block_stride, RANK + ROPE, BLOCK_SIZE, KEYS)
    for token in range(diagonal, end, KEYS):
        next_at = locate(table, token + KEYS, end, block_stride, RANK + ROPE, BLOCK_SIZE, KEYS)
        top, total, acc = attend_rows(
            q_tile, q_rope, position, top, total, acc, kv, at, token, end, scale,
            RANK, ROPE, R, P, BLOCK_SIZE, CODES, KEYS, True, PRECISION,
        )  # fmt: skip
        at = next_at

    # Only queries that are not stored have seen no row.
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    place = out + row[:, None] * out_row + head[:, None] * out_head + r[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=mine)


def plan_latent_prefill(cu_q: Tensor, num_rows: int, geometry: LatentGeometry, tile: Tile) -> Work:
    """Query tiles for cu_q [S + 1] int32; num_rows bounds the rows of all requests together."""
    num_requests = cu_q.shape[0] - 1
    queries, _ = tile_shape(geometry.num_heads, tile.rows)
    bound = num_requests + num_rows // queries
    return cut(cu_q, num_requests, bound, wanted=UNBOUNDED, min_chunk=queries, align=1, window=0)


def latent_prefill(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    tables: Tensor,
    ctx_lens: Tensor,
    cu_q: Tensor,
    work: Work,
    scale: float,
    tile: Tile,
    geometry: LatentGeometry,
) -> None:
    """q [T, num_heads, row]; kv [num_blocks, 1, 1, block_size, row]; out [T, num_heads, rank]; tables [S, blocks];
    cu_q [S + 1] counts rows of q and out."""
    queries, heads = tile_shape(geometry.num_heads, tile.rows)
    latent_prefill_kernel[(triton.cdiv(geometry.num_heads, heads), work.num_pieces)](
        q,
        pointed(kv),
        out,
        tables,
        ctx_lens,
        cu_q,
        work.first_piece,
        work.request,
        scale,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv.stride(0),
        tables.stride(0),
        ROWS=tile.rows,
        QUERIES=queries,
        HEADS=heads,
        KEYS=tile.keys,
        PRECISION=tile.precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **geometry.constants(),
    )
