"""Paged decode: one query row per request against its whole context, the context split over many programs.

    out[s, h] = sum_j softmax_j(scale q[s, h] . k[j, g]) v[j, g],   g = h // GROUP,   j < ctx_lens[s]

Decode reads every key and value once and computes little, so bytes in flight decide its speed. The GROUP query heads
that share a KV head are the rows of one program (padded to ROWS >= 16, the minimum of a tensor core), so K and V are
read once for all of them. Contexts are cut into splits of equal length (attention/triton/work.py); a program writes its
split's normalised part and log-sum-exp, and `merge_kernel` weighs the parts of a request:

    lse_i = log2 sum_{j in split i} 2^{s_j}
    out   = sum_i 2^(lse_i - max lse) part_i / sum_i 2^(lse_i - max lse)

A request of one split is written directly to the output; an empty one (a padding row of a CUDA graph) becomes zeros.

We have not measured this kernel on a GPU yet: scripts/bench.py attention prints GB/s and the share of the ceiling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import pointed
from attention.triton.geometry import Geometry
from attention.triton.merge import merge_parts
from attention.triton.paging import attend_keys, first_key, locate, with_sink
from attention.triton.tiles import Tile
from attention.triton.work import METADATA, Work, cut


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=METADATA)
def decode_kernel(
    q: tl.tensor,  # [S, num_heads, HEAD_SIZE], last axis dense
    kv: tl.tensor,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_SIZE], as geometry.is_dense_within_block
    out: tl.tensor,  # [S, num_heads, HEAD_SIZE], written for requests of one split
    parts: tl.tensor,  # [pieces, num_heads, HEAD_SIZE] float32, written for the others
    lse: tl.tensor,  # [pieces, num_heads] float32, log2
    sinks: tl.tensor,  # [num_heads] float32, with SINKS only
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # query heads per program, >= 16
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
    """Grid (pieces, NUM_KV_HEADS * ceil(GROUP / ROWS))."""
    piece = tl.program_id(0)
    s = tl.load(request + piece)
    if s < 0:
        return
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(1) // HEAD_TILES
    member = tl.program_id(1) % HEAD_TILES * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    d = tl.arange(0, D)
    mine = (member < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]

    first, last = tl.load(first_piece + s), tl.load(first_piece + s + 1)
    ctx_len = tl.load(ctx_lens + s)
    tokens = tl.load(chunk)
    start = first_key(ctx_len - 1, KEYS, WINDOW) + (piece - first) * tokens
    end = tl.minimum(start + tokens, ctx_len)

    q_tile = tl.load(q + s.to(tl.int64) * q_row + head[:, None] * q_head + d[None, :], mask=mine, other=0.0)
    newest = tl.zeros([ROWS], tl.int32) + (end - 1)
    oldest = tl.zeros([ROWS], tl.int32) + (ctx_len - WINDOW)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    keys = kv + kv_head * HEAD_STRIDE
    table = tables + s.to(tl.int64) * table_stride
    # Addresses are loaded one turn ahead: a load that waits for another load of the same turn cannot be pipelined as
    # deeply.
    at = locate(table, start, end, block_stride, HEAD_SIZE, BLOCK_SIZE, KEYS)
    for token in range(start, end, KEYS):
        next_at = locate(table, token + KEYS, end, block_stride, HEAD_SIZE, BLOCK_SIZE, KEYS)
        top, total, acc = attend_keys(
            q_tile, newest, oldest, ctx_len - WINDOW, top, total, acc, keys, at, token, end, scale,
            NUM_KV_HEADS * HEAD_STRIDE, HEAD_SIZE, D, BLOCK_SIZE, CODES, KEYS, True, WINDOW, SOFT_CAP, PRECISION,
        )  # fmt: skip
        at = next_at

    if last - first == 1:  # the merge adds the sink to several splits
        total = with_sink(total, top, sinks, head, member < GROUP, SINKS)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    if last - first == 1:
        place = out + s.to(tl.int64) * out_row + head[:, None] * out_head + d[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=mine)
    else:
        row = piece.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
        tl.store(parts + row[:, None] * HEAD_SIZE + d[None, :], acc, mask=mine)
        tl.store(lse + row, top + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def merge_kernel(
    out: tl.tensor,  # [S, num_heads, HEAD_SIZE], written for requests of several splits
    parts: tl.tensor,  # [pieces, num_heads, HEAD_SIZE] float32
    lse: tl.tensor,  # [pieces, num_heads] float32, log2
    sinks: tl.tensor,  # [num_heads] float32, with SINKS only
    first_piece: tl.tensor,  # [S + 1] int32
    out_row: tl.tensor,
    out_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # splits per turn
    SINKS: tl.constexpr,
) -> None:
    """Grid (S, NUM_HEADS)."""
    s, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(first_piece + s), tl.load(first_piece + s + 1)
    if last - first == 1:
        return
    d = tl.arange(0, D)
    merged = merge_parts(parts, lse, first, last, head, sinks + head, NUM_HEADS, HEAD_SIZE, D, WIDTH, SINKS)
    place = out + s.to(tl.int64) * out_row + head * out_head + d
    tl.store(place, merged.to(out.dtype.element_ty), mask=d < HEAD_SIZE)


def head_rows(group: int, limit: int) -> int:
    """Query heads per program: the group, padded to the minimum of a tensor core, at most `limit`."""
    return min(max(16, 1 << (group - 1).bit_length()), limit)


def plan_decode(ctx_lens: Tensor, geometry: Geometry, tile: Tile, processors: int, window: int) -> Work:
    """Splits for ctx_lens [S] int32; `processors`: the number of programs that the device runs at the same time."""
    num_requests = ctx_lens.shape[0]
    head_tiles = triton.cdiv(geometry.group, head_rows(geometry.group, tile.rows))
    wanted = triton.cdiv(processors, geometry.num_kv_heads * head_tiles)
    return cut(
        ctx_lens,
        num_requests,
        num_requests + wanted,
        wanted=wanted,
        min_chunk=tile.min_chunk,
        align=tile.keys,
        window=window,
    )


def decode(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    tables: Tensor,
    ctx_lens: Tensor,
    work: Work,
    scale: float,
    tile: Tile,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """q, out [S, num_heads, head_size]; kv [num_blocks, 2, num_kv_heads, block_size, head_size]; tables [S, blocks];
    sinks [num_heads] float32."""
    geometry = Geometry.of(q, kv)
    rows = head_rows(geometry.group, tile.rows)
    parts = torch.empty((work.num_pieces, *q.shape[1:]), dtype=torch.float32, device=q.device)
    lse = torch.empty(parts.shape[:2], dtype=torch.float32, device=q.device)
    decode_kernel[(work.num_pieces, geometry.num_kv_heads * triton.cdiv(geometry.group, rows))](
        q,
        pointed(kv),
        out,
        parts,
        lse,
        q if sinks is None else sinks,
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
        WINDOW=window,
        SOFT_CAP=soft_cap,
        SINKS=sinks is not None,
        PRECISION=tile.precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **geometry.constants(),
    )
    merge_kernel[(q.shape[0], q.shape[1])](
        out,
        parts,
        lse,
        q if sinks is None else sinks,
        work.first_piece,
        out.stride(0),
        out.stride(1),
        NUM_HEADS=q.shape[1],
        HEAD_SIZE=geometry.head_size,
        D=geometry.padded,
        WIDTH=16,
        SINKS=sinks is not None,
        num_warps=4,
    )
