"""Short queries over long contexts: several query rows per request, the context split over many programs.

A step that verifies drafts, or a small chunk after a long prefix, has few tiles of queries: eight programs for one
request and 8 KV heads, on a GPU of 132 multiprocessors. Like decode, it reads much and computes little, so the keys
are split as in decode (attention/triton/decode.py) and the parts of a row are merged by their log-sum-exp.

Work is cut twice, both times on the device: queries into tiles of QUERIES tokens (as in prefill, packed with the heads
of the group into ROWS rows), and the keys that the tiles see into splits of equal length:

    spans_i   = keys of tile i = min(query_i + QUERIES, q_len) + past - first visible key
    splits    = spans cut into about as many pieces as the device runs programs (attention/triton/work.py)

A row may see no key of a split: the one on the diagonal, or, with a window, the first. Its part has a log-sum-exp of
-inf there, and no weight. The windows of a tile's rows begin within QUERIES keys of each other, so each row has a key
in one of the first few splits. A tile of one split is written directly to the output.

We have not measured this kernel on a GPU yet: scripts/bench.py attention prints GB/s and the share of the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.triton.codes import pointed
from attention.triton.geometry import Geometry
from attention.triton.merge import merge_parts
from attention.triton.paging import attend_keys, first_key, locate, with_sink
from attention.triton.prefill import tile_shape
from attention.triton.tiles import Tile
from attention.triton.work import METADATA, UNBOUNDED, Work, cut

SHORT = 64
"""Tokens of a chunk up to which it is computed here, whatever the number of requests: the tensor cores would idle in a
tile of prefill."""

TILED = [*METADATA, "first_tile", "tile_request", "spans", "starts"]


@dataclass(slots=True)
class Chunks:
    """The queries to compute: of request s, the rows starts[s] .. cu_q[s + 1] of q."""

    starts: Tensor  # [S] int32, or [S + 1]: cu_q itself
    lengths: Tensor  # [S] int32: their number, or cu_q itself
    num_rows: int  # upper bound on all of them


@dataclass(slots=True)
class ShortWork:
    """The two cuts."""

    starts: Tensor
    tiles: Work  # of queries: request -> tiles
    splits: Work  # of keys: tile -> pieces; its `request` is a tile


@triton.jit(do_not_specialize_on_alignment=TILED)
def span_kernel(
    spans: tl.tensor,  # [tiles] int32, written: keys that the tile reads; 0 = no such tile
    ctx_lens: tl.tensor,  # [S] int32
    starts: tl.tensor,  # [S] int32: the first row of q to compute
    cu_q: tl.tensor,  # [S + 1] int32: rows of q
    first_tile: tl.tensor,  # [S + 1] int32
    tile_request: tl.tensor,  # [tiles] int32
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Grid (tiles,)."""
    tile = tl.program_id(0)
    s = tl.load(tile_request + tile)
    if s < 0:
        tl.store(spans + tile, 0)
        return
    q_len = tl.load(cu_q + s + 1) - tl.load(starts + s)
    query = (tile - tl.load(first_tile + s)) * QUERIES
    past = tl.load(ctx_lens + s) - q_len
    span = past + tl.minimum(query + QUERIES, q_len) - first_key(past + query, KEYS, WINDOW)
    tl.store(spans + tile, tl.where(query < q_len, span, 0))


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=TILED)
def short_kernel(
    q: tl.tensor,  # [T, num_heads, HEAD_SIZE], last axis dense
    kv: tl.tensor,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_SIZE], as geometry.is_dense_within_block
    out: tl.tensor,  # [T, num_heads, HEAD_SIZE], written for tiles of one split
    parts: tl.tensor,  # [pieces, QUERIES, num_heads, HEAD_SIZE] float32, written for the others
    lse: tl.tensor,  # [pieces, QUERIES, num_heads] float32, log2
    sinks: tl.tensor,  # [num_heads] float32, with SINKS only
    tables: tl.tensor,  # [S, max_blocks] int32
    ctx_lens: tl.tensor,  # [S] int32
    starts: tl.tensor,  # [S] int32: the first row of q to compute
    cu_q: tl.tensor,  # [S + 1] int32: rows of q
    first_tile: tl.tensor,  # [S + 1] int32
    tile_request: tl.tensor,  # [tiles] int32
    first_piece: tl.tensor,  # [tiles + 1] int32
    request: tl.tensor,  # [pieces] int32: tiles
    chunk: tl.tensor,  # [1] int32
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
    piece = tl.program_id(0)
    tile = tl.load(request + piece)
    if tile < 0:
        return
    s = tl.load(tile_request + tile)
    if s < 0:
        return
    begin = tl.load(starts + s)
    q_len = tl.load(cu_q + s + 1) - begin
    query = (tile - tl.load(first_tile + s)) * QUERIES
    if query >= q_len:
        return
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    member = tl.program_id(1) % HEAD_TILES * HEADS + r % HEADS
    i = query + r // HEADS
    head = kv_head * GROUP + member
    held = (i < q_len) & (member < GROUP) & (r < QUERIES * HEADS)
    mine = held[:, None] & (d < HEAD_SIZE)[None, :]

    first, last = tl.load(first_piece + tile), tl.load(first_piece + tile + 1)
    past = tl.load(ctx_lens + s) - q_len
    tokens = tl.load(chunk)
    start = first_key(past + query, KEYS, WINDOW) + (piece - first) * tokens
    end = tl.minimum(start + tokens, past + tl.minimum(query + QUERIES, q_len))

    row = (begin + i).to(tl.int64)
    q_tile = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=mine, other=0.0)
    newest = past + i
    oldest = newest - WINDOW + 1
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    keys = kv + kv_head * HEAD_STRIDE
    table = tables + s.to(tl.int64) * table_stride
    # Addresses are loaded one turn ahead, as in decode.
    at = locate(table, start, end, block_stride, HEAD_SIZE, BLOCK_SIZE, KEYS)
    for token in range(start, end, KEYS):
        next_at = locate(table, token + KEYS, end, block_stride, HEAD_SIZE, BLOCK_SIZE, KEYS)
        top, total, acc = attend_keys(
            q_tile, newest, oldest, past + query - WINDOW + 1, top, total, acc, keys, at, token, end, scale,
            NUM_KV_HEADS * HEAD_STRIDE, HEAD_SIZE, D, BLOCK_SIZE, CODES, KEYS, True, WINDOW, SOFT_CAP, PRECISION,
        )  # fmt: skip
        at = next_at

    if last - first == 1:  # the merge adds the sink to several splits
        total = with_sink(total, top, sinks, head, member < GROUP, SINKS)
    total = tl.where(total == 0, 1.0, total)  # no key seen: top is -inf, and acc 0
    acc = acc / total[:, None]
    if last - first == 1:
        place = out + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=mine)
    else:
        part = (piece.to(tl.int64) * QUERIES + r // HEADS) * (NUM_KV_HEADS * GROUP) + head
        tl.store(parts + part[:, None] * HEAD_SIZE + d[None, :], acc, mask=mine)
        tl.store(lse + part, top + tl.log2(total), mask=held)


@triton.jit(do_not_specialize_on_alignment=TILED)
def short_merge_kernel(
    out: tl.tensor,  # [T, num_heads, HEAD_SIZE], written for tiles of several splits
    parts: tl.tensor,  # [pieces, QUERIES, num_heads, HEAD_SIZE] float32
    lse: tl.tensor,  # [pieces, QUERIES, num_heads] float32, log2
    sinks: tl.tensor,  # [num_heads] float32, with SINKS only
    starts: tl.tensor,  # [S] int32: the first row of q to compute
    cu_q: tl.tensor,  # [S + 1] int32: rows of q
    first_tile: tl.tensor,  # [S + 1] int32
    tile_request: tl.tensor,  # [tiles] int32
    first_piece: tl.tensor,  # [tiles + 1] int32
    out_row: tl.tensor,
    out_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # splits per turn
    SINKS: tl.constexpr,
) -> None:
    """Grid (tiles * QUERIES, NUM_HEADS)."""
    tile, i = tl.program_id(0) // QUERIES, tl.program_id(0) % QUERIES
    head = tl.program_id(1)
    s = tl.load(tile_request + tile)
    if s < 0:
        return
    first, last = tl.load(first_piece + tile), tl.load(first_piece + tile + 1)
    begin = tl.load(starts + s)
    query = (tile - tl.load(first_tile + s)) * QUERIES + i
    if (last - first == 1) | (query >= tl.load(cu_q + s + 1) - begin):
        return
    d = tl.arange(0, D)
    merged = merge_parts(
        parts, lse, first, last, i * NUM_HEADS + head, sinks + head, QUERIES * NUM_HEADS, HEAD_SIZE, D, WIDTH, SINKS
    )
    place = out + (begin + query).to(tl.int64) * out_row + head * out_head + d
    tl.store(place, merged.to(out.dtype.element_ty), mask=d < HEAD_SIZE)


def is_short(requests: int, rows: int, longest: int, geometry: Geometry, prefill: Tile, processors: int) -> bool:
    """Whether these chunks belong here and not to attention/triton/prefill.py: all of them are short, or the tiles of
    prefill would leave processors without work. `rows` of all chunks, `longest` of one (0 = unknown)."""
    queries, heads = tile_shape(geometry.group, prefill.rows)
    programs = (requests + rows // queries) * geometry.num_kv_heads * triton.cdiv(geometry.group, heads)
    return 0 < (longest or rows) <= SHORT or programs < processors


def plan_short(
    chunks: Chunks, cu_q: Tensor, ctx_lens: Tensor, geometry: Geometry, tile: Tile, processors: int, window: int
) -> ShortWork:
    """cu_q [S + 1], ctx_lens [S] int32; `processors`: the number of programs that the device runs at the same time."""
    queries, heads = tile_shape(geometry.group, tile.rows)
    requests = ctx_lens.shape[0]
    bound = requests + chunks.num_rows // queries
    tiles = cut(chunks.lengths, requests, bound, wanted=UNBOUNDED, min_chunk=queries, align=1, window=0)
    spans = torch.empty(tiles.num_pieces, dtype=torch.int32, device=cu_q.device)
    span_kernel[(tiles.num_pieces,)](
        spans,
        ctx_lens,
        chunks.starts,
        cu_q,
        tiles.first_piece,
        tiles.request,
        QUERIES=queries,
        KEYS=tile.keys,
        WINDOW=window,
        num_warps=1,
    )
    wanted = triton.cdiv(processors, geometry.num_kv_heads * triton.cdiv(geometry.group, heads))
    splits = cut(
        spans,
        tiles.num_pieces,
        tiles.num_pieces + wanted,
        wanted=wanted,
        min_chunk=tile.min_chunk,
        align=tile.keys,
        window=0,
    )
    return ShortWork(chunks.starts, tiles, splits)


def short(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    tables: Tensor,
    ctx_lens: Tensor,
    cu_q: Tensor,
    work: ShortWork,
    scale: float,
    tile: Tile,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """The arguments of prefill.prefill; the tile is one of decode."""
    geometry, tiles, splits = Geometry.of(q, kv), work.tiles, work.splits
    queries, heads = tile_shape(geometry.group, tile.rows)
    parts = torch.empty((splits.num_pieces, queries, *q.shape[1:]), dtype=torch.float32, device=q.device)
    lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
    short_kernel[(splits.num_pieces, geometry.num_kv_heads * triton.cdiv(geometry.group, heads))](
        q,
        pointed(kv),
        out,
        parts,
        lse,
        q if sinks is None else sinks,
        tables,
        ctx_lens,
        work.starts,
        cu_q,
        tiles.first_piece,
        tiles.request,
        splits.first_piece,
        splits.request,
        splits.chunk,
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
    short_merge_kernel[(tiles.num_pieces * queries, q.shape[1])](
        out,
        parts,
        lse,
        q if sinks is None else sinks,
        work.starts,
        cu_q,
        tiles.first_piece,
        tiles.request,
        splits.first_piece,
        out.stride(0),
        out.stride(1),
        NUM_HEADS=q.shape[1],
        QUERIES=queries,
        HEAD_SIZE=geometry.head_size,
        D=geometry.padded,
        WIDTH=16,
        SINKS=sinks is not None,
        num_warps=4,
    )
