"""Chunked prefill over a paged prefix: the new tokens of a request attend to all cached tokens and to one another.
Attention is causal.

Row i of request s is at position p = ctx_lens[s] - q_len[s] + i and

    out[i, h] = sum_{j <= p} softmax_j(scale q[i, h] . k[j, g]) v[j, g],   g = h // GROUP

Prefill computes much per byte, so the kernel must keep the tensor cores busy. A program owns a tile of QUERIES tokens
times the GROUP heads of one KV head, packed into ROWS rows (row r is token r // GROUP, head r % GROUP): K and V tiles
serve all heads of the group, and short chunks still fill the rows. Keys before the tile's first position are seen by
every row and need no mask; only the tiles on the diagonal do. Later tiles of a chunk see more keys, so they start
first: the short ones fill the gaps at the end of the launch.

The keys of the chunk itself must be in the pool already (write_kv comes first).

This is the kernel for any pool, on any GPU since Ampere. attention/triton/short.py computes chunks that would leave
most of the machine idle here, attention/triton/hopper.py long ones on Hopper over large blocks.

We have not measured this kernel on a GPU yet: scripts/bench.py attention prints TFLOP/s and the share of the ceiling.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import pointed
from attention.triton.geometry import Geometry
from attention.triton.paging import attend_keys, first_key, locate, with_sink
from attention.triton.tiles import Tile
from attention.triton.work import METADATA, UNBOUNDED, Work, cut


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=METADATA)
def prefill_kernel(
    q: tl.tensor,  # [T, num_heads, HEAD_SIZE], last axis dense
    kv: tl.tensor,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_SIZE], as geometry.is_dense_within_block
    out: tl.tensor,  # [T, num_heads, HEAD_SIZE], written
    sinks: tl.tensor,  # [num_heads] float32, with SINKS only
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,  # tokens per program
    HEADS: tl.constexpr,  # heads per program; QUERIES * HEADS <= ROWS
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,  # elements from one head to the next in a block
    CODES: tl.constexpr,  # of a quantized pool: attention/triton/codes.py
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (pieces, NUM_KV_HEADS * ceil(GROUP / HEADS))."""
    piece = tl.num_programs(0) - 1 - tl.program_id(0)
    s = tl.load(request + piece)
    if s < 0:
        return
    begin = tl.load(cu_q + s)
    q_len = tl.load(cu_q + s + 1) - begin
    query = (piece - tl.load(first_piece + s)) * QUERIES
    if query >= q_len:
        return
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    member = tl.program_id(1) % HEAD_TILES * HEADS + r % HEADS
    i = query + r // HEADS
    head = kv_head * GROUP + member
    mine = ((i < q_len) & (member < GROUP) & (r < QUERIES * HEADS))[:, None] & (d < HEAD_SIZE)[None, :]

    past = tl.load(ctx_lens + s) - q_len
    position = past + i
    lowest = past + query
    oldest, least = position - WINDOW + 1, lowest - WINDOW + 1
    end = past + tl.minimum(query + QUERIES, q_len)
    row = (begin + i).to(tl.int64)
    q_tile = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=mine, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    keys = kv + kv_head * HEAD_STRIDE
    table = tables + s.to(tl.int64) * table_stride
    VALUES: tl.constexpr = NUM_KV_HEADS * HEAD_STRIDE

    diagonal = first_key(lowest, KEYS, WINDOW)
    if WINDOW == 0:
        diagonal = (lowest + 1) // KEYS * KEYS
        # Addresses are loaded one turn ahead: a load that waits for another load of the same turn cannot be pipelined
        # as deeply.
        at = locate(table, 0, end, block_stride, HEAD_SIZE, BLOCK_SIZE, KEYS)
        for token in range(0, diagonal, KEYS):
            next_at = locate(table, token + KEYS, end, block_stride, HEAD_SIZE, BLOCK_SIZE, KEYS)
            top, total, acc = attend_keys(
                q_tile, position, oldest, least, top, total, acc, keys, at, token, end, scale,
                VALUES, HEAD_SIZE, D, BLOCK_SIZE, CODES, KEYS, False, WINDOW, SOFT_CAP, PRECISION,
            )  # fmt: skip
            at = next_at
    at = locate(table, diagonal, end, block_stride, HEAD_SIZE, BLOCK_SIZE, KEYS)
    for token in range(diagonal, end, KEYS):
        next_at = locate(table, token + KEYS, end, block_stride, HEAD_SIZE, BLOCK_SIZE, KEYS)
        top, total, acc = attend_keys(
            q_tile, position, oldest, least, top, total, acc, keys, at, token, end, scale,
            VALUES, HEAD_SIZE, D, BLOCK_SIZE, CODES, KEYS, True, WINDOW, SOFT_CAP, PRECISION,
        )  # fmt: skip
        at = next_at

    total = with_sink(total, top, sinks, head, member < GROUP, SINKS)
    # Only rows that are not stored have seen no key.
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    place = out + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=mine)


def tile_shape(group: int, rows: int) -> tuple[int, int]:
    """(tokens, heads) of a program's `rows` rows: whole groups if they fit."""
    heads = min(group, rows)
    return rows // heads, heads


def plan_prefill(cu_q: Tensor, num_rows: int, geometry: Geometry, tile: Tile) -> Work:
    """Query tiles for cu_q [S + 1] int32; num_rows bounds the rows of all requests together."""
    num_requests = cu_q.shape[0] - 1
    queries, _ = tile_shape(geometry.group, tile.rows)
    bound = num_requests + num_rows // queries
    return cut(cu_q, num_requests, bound, wanted=UNBOUNDED, min_chunk=queries, align=1, window=0)


def prefill(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    tables: Tensor,
    ctx_lens: Tensor,
    cu_q: Tensor,
    work: Work,
    scale: float,
    tile: Tile,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """q, out [T, num_heads, head_size]; kv [num_blocks, 2, num_kv_heads, block_size, head_size]; tables [S, blocks];
    cu_q [S + 1] counts rows of q and out; sinks [num_heads] float32."""
    geometry = Geometry.of(q, kv)
    queries, heads = tile_shape(geometry.group, tile.rows)
    prefill_kernel[(work.num_pieces, geometry.num_kv_heads * triton.cdiv(geometry.group, heads))](
        q,
        pointed(kv),
        out,
        q if sinks is None else sinks,
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
        WINDOW=window,
        SOFT_CAP=soft_cap,
        SINKS=sinks is not None,
        PRECISION=tile.precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **geometry.constants(),
    )
