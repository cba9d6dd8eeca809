"""The part common to the decode and prefill kernels: one step of the online softmax over a tile of paged keys.

A program holds ROWS query rows q [ROWS, D] of one request and one KV head, in registers or shared memory for the
whole launch, and walks over that request's keys, KEYS tokens at a time. Row r at position p sees key j if

    j <= p   and, with a sliding window,   p - j < WINDOW

With scores s_j = scale q . k_j (or SOFT_CAP tanh(s_j / SOFT_CAP)) in units of log2, so that exp2 suffices, one turn
over a tile of keys is

    top'   = max(top, max_j s_j)                 running maximum              [ROWS] float32
    p_j    = 2^(s_j - top')
    total' = total 2^(top - top') + sum_j p_j    running denominator          [ROWS] float32
    acc'   = acc 2^(top - top') + sum_j p_j v_j  running numerator            [ROWS, D] float32

and acc / total is the attention of the keys seen so far, top + log2(total) their log-sum-exp. With sinks, 2^(sink -
top) is added to the total of all keys.

Keys are found through the block table: token j of a request is in block table[j // BLOCK_SIZE] at offset j %
BLOCK_SIZE. If a tile never crosses a block (KEYS divides BLOCK_SIZE) one table entry serves the tile; otherwise every
row of the tile loads its own entry, so KEYS and BLOCK_SIZE are independent. Offsets are int64: a pool of more than 2^31
elements (4 GiB in bfloat16) is ordinary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.triton.codes import read_scales, widen

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_key(position: tl.tensor, KEYS: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """The first key worth reading for a row at `position`, rounded down to a whole tile. WINDOW 0 = no window."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    return first


@triton.jit
def with_sink(
    total: tl.tensor,  # [ROWS] float32
    top: tl.tensor,  # [ROWS] float32
    sinks: tl.tensor,  # [num_heads] float32, with SINKS only
    head: tl.tensor,  # [ROWS]
    held: tl.tensor,  # [ROWS]: rows of heads that exist
    SINKS: tl.constexpr,
) -> tl.tensor:
    """The denominator with the weight of the sink of a row's head: one more score, without a value. For a row that has
    seen no key it is infinite, so that the row is zero."""
    if SINKS:
        total += tl.exp2(tl.load(sinks + head, mask=held, other=0.0) * LOG2_E - top)
    return total


@triton.jit
def locate(
    table: tl.tensor,  # pointer: the request's block table, int32
    first: tl.tensor,  # first token of the tile, a multiple of KEYS
    end: tl.tensor,  # tokens from here on are not looked up
    block_stride: tl.tensor,  # elements from one block to the next
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Elements from block 0 to the tokens of a tile, [KEYS] int64."""
    token = first + tl.arange(0, KEYS)
    if BLOCK_SIZE % KEYS == 0:
        block = tl.load(table + first // BLOCK_SIZE, mask=first < end, other=0).to(tl.int64)
        at = block * block_stride + (first % BLOCK_SIZE + tl.arange(0, KEYS)) * HEAD_SIZE
    else:
        block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        at = block * block_stride + (token % BLOCK_SIZE) * HEAD_SIZE
    return at


@triton.jit
def tanh(x: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """1 - 2 / (e^2x + 1), correct at both ends, where e^2x is 0 or inf. Near 0 the difference cancels to an absolute
    error of 2^-24, which is invisible in half types; EXACT uses the series there."""
    value = 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1)
    if EXACT:
        y = x * x
        series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
        value = tl.where(tl.abs(x) < 0.3, series, value)
    return value


@triton.jit
def capped(scores: tl.tensor, scale: tl.tensor, SOFT_CAP: tl.constexpr, EXACT: tl.constexpr) -> tl.tensor:
    """Scores in units of `unit_of`: that scaling is left to the exponent, where it is one instruction with the
    subtraction."""
    if SOFT_CAP > 0:
        scores = tanh(scores * (scale / SOFT_CAP), EXACT)
    return scores


@triton.jit
def unit_of(scale: tl.tensor, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """The factor that brings the scores of `capped` to units of log2."""
    return LOG2_E * (scale if SOFT_CAP == 0 else SOFT_CAP)


@triton.jit
def weigh(
    scores: tl.tensor,  # [ROWS, KEYS] float32, -inf where hidden
    top: tl.tensor,
    total: tl.tensor,
    unit: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """One tile of keys: top', total', the weights p [ROWS, KEYS], and the factor 2^(top - top') [ROWS] of the sums."""
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    # A row that has seen no key yet keeps top = -inf; replacing it by 0 makes all its weights 2^-inf = 0, not NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * unit - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    total = total * shrink + tl.sum(weights, 1)
    return new_top, total, weights, shrink


@triton.jit
def attend_keys(
    q: tl.tensor,  # [ROWS, D] in the type of the product
    newest: tl.tensor,  # [ROWS] int32: the last key that the row sees here
    oldest: tl.tensor,  # [ROWS] int32: the first one; this and the next are used only with a window
    least: tl.tensor,  # the smallest of these
    top: tl.tensor,  # [ROWS] float32, -inf before the first visible key
    total: tl.tensor,  # [ROWS] float32
    acc: tl.tensor,  # [ROWS, D] float32
    keys: tl.tensor,  # pointer: K of this KV head in block 0
    at: tl.tensor,  # [KEYS] int64: offsets of the tile's tokens, from `locate`
    first: tl.tensor,  # first token of the tile, a multiple of KEYS
    end: tl.tensor,  # tokens from here on are not read
    scale: tl.tensor,  # positive
    VALUES: tl.constexpr,  # elements from K to V of the same head and block
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,  # HEAD_SIZE rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    CODES: tl.constexpr,  # of a quantized pool: attention/triton/codes.py; 0 = floats
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of the tile
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0.0 = none
    PRECISION: tl.constexpr,  # of products of float32 operands
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns top, total, acc after the keys first .. min(first + KEYS, end)."""
    token = first + tl.arange(0, KEYS)
    d = tl.arange(0, D)
    place = keys + at[:, None] + d[None, :]
    # A slot without a token, and behind the window a block of another request, may contain anything, and NaN times a
    # weight of zero is NaN: they are never loaded.
    seen = token < end
    if WINDOW > 0:
        seen = seen & (token >= least)
    if MASKED:
        held = seen[:, None] & (d < HEAD_SIZE)[None, :]
        k = tl.load(place, mask=held, other=0.0)
        v = tl.load(place + VALUES, mask=held, other=0.0)
    elif D != HEAD_SIZE:
        k = tl.load(place, mask=(d < HEAD_SIZE)[None, :], other=0.0)
        v = tl.load(place + VALUES, mask=(d < HEAD_SIZE)[None, :], other=0.0)
    else:
        k = tl.load(place)
        v = tl.load(place + VALUES)
    if CODES > 0:
        k, v = widen(k, q.dtype, CODES), widen(v, q.dtype, CODES)
    elif k.dtype != q.dtype:
        k = k.to(tl.float32).to(q.dtype)
        v = v.to(tl.float32).to(q.dtype)

    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CODES > 0:
        scores *= read_scales(keys + at, token % BLOCK_SIZE, seen, HEAD_SIZE, BLOCK_SIZE, CODES)[None, :]
    scores = capped(scores, scale, SOFT_CAP, q.dtype == tl.float32)
    if MASKED:
        visible = token[None, :] <= newest[:, None]
        if WINDOW > 0:
            visible = visible & (token[None, :] >= oldest[:, None])
        scores = tl.where(visible, scores, float("-inf"))

    top, total, weights, shrink = weigh(scores, top, total, unit_of(scale, SOFT_CAP))
    if CODES > 0:
        values = keys + VALUES
        weights *= read_scales(values + at, token % BLOCK_SIZE, seen, HEAD_SIZE, BLOCK_SIZE, CODES)[None, :]
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return top, total, acc
