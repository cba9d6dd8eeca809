"""Long chunks on Hopper: one warp group copies, two compute, and each computes its softmax while the other multiplies.

attention/triton/prefill.py gathers keys token by token, waits for every product, and only then makes weights, while the
tensor cores idle. Here the copy engine (TMA) fetches a tile of keys as one box [KEYS, HEAD_SIZE], which needs blocks
of whole tiles, and the loop is warp-specialized: Triton gives the copies to one warp group and each half of the rows to
one of two others. They meet only at the buffers, so one multiplies while the other makes weights.

Triton 3.6 specializes on sm_90 only what this kernel has: descriptors made on the device, no gathered operand, one loop
with products and none outside of it, no early return. So a tile is ROWS tokens of one head, and all are whole:

    lead_s    = the queries of request s in whole tiles of ROWS that see only whole tiles of KEYS held tokens
              = min(q_len, ctx_len // KEYS KEYS - past) // ROWS ROWS
    the rest  = fewer than ROWS + KEYS queries per request: attention/triton/short.py

As many programs as multiprocessors run, if shared memory has room for a second tile of queries: each takes one tile
after the other, and copies the next one's queries and keys while it stores the last one.

A slot without a token is never read. Masks are applied in every turn: they cost issue slots of warps that wait for the
tensor cores anyway (`scripts/bench.py attention --aot` prints both).

We have not measured this kernel on a GPU yet: scripts/bench.py attention prints TFLOP/s and the share of the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.geometry import Geometry
from attention.triton.paging import capped, unit_of, weigh, with_sink
from attention.triton.short import Chunks
from attention.triton.tiles import Tile, Tiles
from attention.triton.work import METADATA, UNBOUNDED, Work, cut

LONG = 512
"""Tokens of a chunk from which the rest is a small part of it."""

LEAST_KEYS = 64
"""A smaller box would keep the tensor cores waiting."""

LEADING = [*METADATA, "lead", "starts", "rest"]


@dataclass(slots=True)
class LongWork:
    """Whole tiles of the chunks, and where the rest of each begins."""

    tiles: Work  # request -> tiles of ROWS queries
    lead: Tensor  # [S] int32: queries in whole tiles
    rest: Chunks
    keys: int  # per turn
    processors: int


@triton.jit(do_not_specialize_on_alignment=LEADING)
def lead_kernel(
    lead: tl.tensor,  # [S] int32, written, as the next two
    starts: tl.tensor,
    rest: tl.tensor,
    ctx_lens: tl.tensor,  # [S] int32
    cu_q: tl.tensor,  # [S + 1] int32: rows of q
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Grid (S,)."""
    s = tl.program_id(0)
    begin = tl.load(cu_q + s)
    q_len = tl.load(cu_q + s + 1) - begin
    ctx_len = tl.load(ctx_lens + s)
    whole = tl.minimum(q_len, ctx_len // KEYS * KEYS - (ctx_len - q_len))
    queries = tl.maximum(whole, 0) // ROWS * ROWS
    tl.store(lead + s, queries)
    tl.store(starts + s, begin + queries)
    tl.store(rest + s, q_len - queries)


@triton.jit
def long_tile(
    item: tl.tensor,  # tiles of queries from the longest context to the shortest, for one head after the other
    num_pieces: tl.tensor,
    rows: tl.tensor,  # descriptor of q as rows of all heads, boxes [ROWS, HEAD_SIZE]
    pool: tl.tensor,  # descriptor of the pool as rows of one head, boxes [KEYS, HEAD_SIZE]
    out: tl.tensor,  # these as in long_kernel
    sinks: tl.tensor,
    tables: tl.tensor,
    ctx_lens: tl.tensor,
    cu_q: tl.tensor,
    lead: tl.tensor,
    first_piece: tl.tensor,
    request: tl.tensor,
    unit: tl.tensor,  # paging.unit_of
    scale: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    block_rows: tl.tensor,
    table_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Computes one tile. One that does not exist makes no turn and stores nothing."""
    head = item // num_pieces
    piece = num_pieces - 1 - item % num_pieces
    found = tl.load(request + piece)
    s = tl.maximum(found, 0)
    query = (piece - tl.load(first_piece + s)) * ROWS
    exists = (found >= 0) & (query < tl.load(lead + s))
    begin = tl.load(cu_q + s)
    lowest = tl.load(ctx_lens + s) - (tl.load(cu_q + s + 1) - begin) + query
    end = tl.where(exists, lowest + ROWS, 0)
    position = lowest + tl.arange(0, ROWS)
    token_of = tl.arange(0, KEYS)

    table = tables + s.to(tl.int64) * table_stride
    first_row = head // GROUP * BLOCK_SIZE
    q_tile = rows.load([begin + query, head * HEAD_SIZE])
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_SIZE], tl.float32)
    for token in tl.range(0, end, KEYS, warp_specialize=True):
        row = tl.load(table + token // BLOCK_SIZE) * block_rows + first_row + token % BLOCK_SIZE
        scores = capped(tl.dot(q_tile, tl.trans(pool.load([row, 0]))), scale, SOFT_CAP, False)
        scores = tl.where((token + token_of)[None, :] <= position[:, None], scores, float("-inf"))
        top, total, weights, shrink = weigh(scores, top, total, unit)
        values = pool.load([row + NUM_KV_HEADS * BLOCK_SIZE, 0])
        acc = tl.dot(weights.to(q_tile.dtype), values, acc * shrink[:, None])

    total = with_sink(total, top, sinks, head + position * 0, exists & (position < end), SINKS)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    at = (begin + query + tl.arange(0, ROWS)).to(tl.int64)
    place = out + at[:, None] * out_row + head * out_head + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=exists & (position < end)[:, None])


@triton.jit(do_not_specialize=["table_stride", "num_pieces"], do_not_specialize_on_alignment=LEADING)
def long_kernel(
    q: tl.tensor,  # [T, num_heads, HEAD_SIZE], heads dense
    kv: tl.tensor,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_SIZE], as geometry.is_dense_within_block
    out: tl.tensor,  # [T, num_heads, HEAD_SIZE], written for queries in whole tiles
    sinks: tl.tensor,  # [num_heads] float32, with SINKS only
    tables: tl.tensor,  # [S, max_blocks] int32
    ctx_lens: tl.tensor,  # [S] int32
    cu_q: tl.tensor,  # [S + 1] int32: rows of q
    lead: tl.tensor,  # [S] int32
    first_piece: tl.tensor,  # [S + 1] int32
    request: tl.tensor,  # [pieces] int32
    num_pieces: tl.tensor,
    scale: tl.tensor,
    q_rows: tl.tensor,  # T
    q_row: tl.tensor,  # strides, elements
    out_row: tl.tensor,
    out_head: tl.tensor,
    pool_rows: tl.tensor,  # rows of HEAD_SIZE elements from kv to the end of its last block
    block_rows: tl.tensor,  # from one block to the next
    table_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # a multiple of KEYS
    KEYS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PERSISTENT: tl.constexpr,
) -> None:
    """Grid (programs,): PERSISTENT: each computes every num_programs-th tile; otherwise one."""
    rows = tl.make_tensor_descriptor(
        q, shape=[q_rows, NUM_KV_HEADS * GROUP * HEAD_SIZE], strides=[q_row, 1], block_shape=[ROWS, HEAD_SIZE]
    )
    pool = tl.make_tensor_descriptor(
        kv, shape=[pool_rows, HEAD_SIZE], strides=[HEAD_SIZE, 1], block_shape=[KEYS, HEAD_SIZE]
    )
    unit = unit_of(scale, SOFT_CAP)
    if PERSISTENT:
        for item in range(tl.program_id(0), num_pieces * NUM_KV_HEADS * GROUP, tl.num_programs(0)):
            long_tile(
                item, num_pieces, rows, pool, out, sinks, tables, ctx_lens, cu_q, lead, first_piece, request, unit,
                scale, out_row, out_head, block_rows, table_stride,
                NUM_KV_HEADS, GROUP, ROWS, HEAD_SIZE, BLOCK_SIZE, KEYS, SOFT_CAP, SINKS,
            )  # fmt: skip
    else:
        long_tile(
            tl.program_id(0), num_pieces, rows, pool, out, sinks, tables, ctx_lens, cu_q, lead, first_piece, request,
            unit, scale, out_row, out_head, block_rows, table_stride,
            NUM_KV_HEADS, GROUP, ROWS, HEAD_SIZE, BLOCK_SIZE, KEYS, SOFT_CAP, SINKS,
        )  # fmt: skip


def long_keys(tiles: Tiles, geometry: Geometry, q: Tensor, kv: Tensor, window: int, longest: int) -> int:
    """Keys per turn for chunks of up to `longest` queries; 0 = these belong to another kernel: the GPU is older, the
    chunks are short, the blocks are small, the pool is quantized, or an address is not a multiple of 16 bytes."""
    tile, size = tiles.long, geometry.head_size
    if tile is None or window or longest < LONG or geometry.codes or kv.dtype != q.dtype or size != geometry.padded:
        return 0
    aligned = all(n * q.itemsize % 16 == 0 for n in (q.stride(0), q.storage_offset(), kv.storage_offset()))
    matrix = q.stride(1) == size and kv.stride(0) % size == 0 and pool_rows(kv) < 1 << 31
    keys = gcd(geometry.block_size, tile.keys)
    return keys if aligned and matrix and keys >= min(LEAST_KEYS, tile.keys) else 0


def pool_rows(kv: Tensor) -> int:
    """Rows of one head from the start of kv to its end, with those of other layers between its blocks."""
    num_blocks, _, num_kv_heads, block_size, head_size = kv.shape
    return (num_blocks - 1) * kv.stride(0) // head_size + 2 * num_kv_heads * block_size


def plan_long(
    cu_q: Tensor, ctx_lens: Tensor, q_lens: list[int], kv_lens: list[int], tile: Tile, keys: int, processors: int
) -> LongWork:
    """cu_q [S + 1], ctx_lens [S] int32, with the same lengths as host numbers: no recorded step has long chunks. `keys`
    from `long_keys`; `processors`: the number of programs that the device runs at the same time."""
    requests, rows = ctx_lens.shape[0], tile.rows
    leading = [max(0, min(q, n // keys * keys - (n - q))) // rows * rows for q, n in zip(q_lens, kv_lens, strict=True)]
    lead, starts, rest = torch.empty(3, requests, dtype=torch.int32, device=cu_q.device)
    lead_kernel[(requests,)](lead, starts, rest, ctx_lens, cu_q, ROWS=rows, KEYS=keys, num_warps=1)
    bound = sum(max(1, count // rows) for count in leading)
    tiles = cut(lead, requests, bound, wanted=UNBOUNDED, min_chunk=rows, align=1, window=0)
    return LongWork(tiles, lead, Chunks(starts, rest, sum(q_lens) - sum(leading)), keys, processors)


def long(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    tables: Tensor,
    ctx_lens: Tensor,
    cu_q: Tensor,
    work: LongWork,
    scale: float,
    tile: Tile,
    *,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """The arguments of prefill.prefill; computes the queries in whole tiles only."""
    geometry = Geometry.of(q, kv)
    if q.is_cuda:
        triton.set_allocator(scratch)
    items = work.tiles.num_pieces * geometry.num_heads
    long_kernel[(min(items, work.processors) if tile.persistent else items,)](
        q,
        kv,
        out,
        q if sinks is None else sinks,
        tables,
        ctx_lens,
        cu_q,
        work.lead,
        work.tiles.first_piece,
        work.tiles.request,
        work.tiles.num_pieces,
        scale,
        q.shape[0],
        q.stride(0),
        out.stride(0),
        out.stride(1),
        pool_rows(kv),
        kv.stride(0) // geometry.head_size,
        tables.stride(0),
        NUM_KV_HEADS=geometry.num_kv_heads,
        GROUP=geometry.group,
        ROWS=tile.rows,
        HEAD_SIZE=geometry.head_size,
        BLOCK_SIZE=geometry.block_size,
        KEYS=work.keys,
        SOFT_CAP=soft_cap,
        SINKS=sinks is not None,
        PERSISTENT=tile.persistent,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for the descriptors that a launch makes, in the way that triton.set_allocator asks for."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
