"""The part common to decode and prefill: one step of the online softmax over a tile of latent rows.

A row of the pool is [c | p]: the latent c [RANK], which is key and value, and the rotary part p [ROPE] of the key. A
program holds ROWS queries [n | r] of one request, which may be of several heads and tokens, and walks over the rows of
the request, KEYS at a time. c is loaded once, for both products and for all ROWS:

    s = n c^T + r p^T          acc' = acc 2^(top - top') + 2^(s - top') c

attention/triton/paging.py has the softmax and finds the rows through the block table; attention/triton/codes.py has the
scales of quantized rows, one per row, which multiply its scores and its weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.triton.codes import read_scales, widen
from attention.triton.paging import LOG2_E


@triton.jit
def attend_rows(
    q: tl.tensor,  # [ROWS, R] in the type of the product
    q_rope: tl.tensor,  # [ROWS, P]
    newest: tl.tensor,  # [ROWS] int32: the last row of the pool that the query sees
    top: tl.tensor,  # [ROWS] float32, -inf before the first visible row
    total: tl.tensor,  # [ROWS] float32
    acc: tl.tensor,  # [ROWS, R] float32
    rows: tl.tensor,  # pointer: this layer's part of block 0
    at: tl.tensor,  # [KEYS] int64: offsets of the tile's rows, from paging.locate
    first: tl.tensor,  # first token of the tile, a multiple of KEYS
    end: tl.tensor,  # tokens from here on are not read
    scale: tl.tensor,  # positive
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    R: tl.constexpr,  # RANK rounded up to a power of two
    P: tl.constexpr,  # ROPE rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,  # of a quantized pool: attention/triton/codes.py; 0 = floats
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # False: every query sees every row of the tile
    PRECISION: tl.constexpr,  # of products of float32 operands
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns top, total, acc after the rows first .. min(first + KEYS, end)."""
    token = first + tl.arange(0, KEYS)
    r, p = tl.arange(0, R), tl.arange(0, P)
    latents = rows + at[:, None] + r[None, :]
    keys = rows + at[:, None] + (RANK + p)[None, :]
    # A slot without a token may contain anything, and NaN times a weight of zero is NaN, so it is never loaded.
    if MASKED or R != RANK or P != ROPE:
        held = (token < end)[:, None]
        c = tl.load(latents, mask=held & (r < RANK)[None, :], other=0.0)
        k = tl.load(keys, mask=held & (p < ROPE)[None, :], other=0.0)
    else:
        c = tl.load(latents)
        k = tl.load(keys)
    if CODES > 0:
        c, k = widen(c, q.dtype, CODES), widen(k, q.dtype, CODES)
    elif c.dtype != q.dtype:
        c = c.to(tl.float32).to(q.dtype)
        k = k.to(tl.float32).to(q.dtype)

    scores = tl.dot(q_rope, tl.trans(k), input_precision=PRECISION)
    scores = tl.dot(q, tl.trans(c), scores, input_precision=PRECISION)
    if CODES > 0:
        factor = read_scales(rows + at, token % BLOCK_SIZE, token < end, RANK + ROPE, BLOCK_SIZE, CODES)
        scores *= factor[None, :]
    unit = LOG2_E * scale
    if MASKED:
        scores = tl.where(token[None, :] <= newest[:, None], scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    # A query that has seen no row yet keeps top = -inf; replacing it by 0 makes all its weights 2^-inf = 0, not NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * unit - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    total = total * shrink + tl.sum(weights, 1)
    if CODES > 0:
        weights *= factor[None, :]
    acc = tl.dot(weights.to(q.dtype), c, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc
