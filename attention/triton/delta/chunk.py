"""Many tokens of one request, in pieces of PIECE tokens. It is the chunkwise form of the gated delta rule with its WY
representation (arXiv 2412.06464, section 3.3 and appendix A), for a decay of each head or of each channel of the key.

The formulas are those of attention/delta_rule.py. A program has some columns of the matrix of one head in registers,
in one or two tiles of up to 64 rows, and takes the pieces one after another:

    V' = (I + A)^-1 b (V - (e^G K) S)      O = (e^G Q) S + (Q, K) V'      S <- e^(G_C) S + (e^(G_C - G) K)^T V'

The inverse [PIECE, PIECE] is found row by row. With a decay for each channel, e^(G_ic - G_jc) is computed for one j at
a time, because its two factors would overflow. Exponents are sums of the decays between two tokens, not differences of
G, which lose digits after a strong decay. We have not measured this kernel on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.triton.delta.places import places

PIECE = 16
"""Tokens: the smallest matrix of a tensor core."""


@triton.jit
def rows_of(
    x: tl.tensor, row: tl.tensor, stride: tl.tensor, first: tl.tensor, c: tl.tensor, live: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Elements first + c of rows as float32, [rows, c]; zeros from c = SIZE on and in rows that are not live."""
    mask = live[:, None] & (c < SIZE)[None, :]
    return tl.load(x + row[:, None] * stride + first + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def one_over_length(
    x: tl.tensor, row: tl.tensor, stride: tl.tensor, first: tl.tensor, live: tl.tensor,
    SIZE: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[rows]"""
    whole = rows_of(x, row, stride, first, tl.arange(0, K), live, SIZE)
    return tl.rsqrt(tl.sum(whole * whole, 1) + EPS)


@triton.jit
def read_tile(
    system: tl.tensor,  # [SIZE, SIZE]: (K, K), a sum over the tiles, as the next three
    scores: tl.tensor,  # [SIZE, SIZE]: (Q, K)
    known: tl.tensor,  # [SIZE, COLUMNS]: (e^G K) S
    found: tl.tensor,  # [SIZE, COLUMNS]: (e^G Q) S
    state: tl.tensor,  # [TILE, COLUMNS]
    q: tl.tensor,  # pointers and strides: see delta_chunk_kernel
    k: tl.tensor,
    decay: tl.tensor,
    q_row: tl.tensor,
    k_row: tl.tensor,
    first: tl.tensor,  # element of the key head in a row
    of_q: tl.tensor,  # [SIZE]: factors
    of_k: tl.tensor,
    row: tl.tensor,  # [SIZE]
    token: tl.tensor,  # [SIZE]: rows of the decays
    live: tl.tensor,  # [SIZE]
    gain: tl.tensor,  # [SIZE, 1], for decays of heads
    c: tl.tensor,  # [TILE]
    KEY_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Adds a tile of the state. With decays of heads, system and scores are without the decays between tokens."""
    key = rows_of(k, row, k_row, first, c, live, KEY_SIZE) * of_k[:, None]
    query = rows_of(q, row, q_row, first, c, live, KEY_SIZE) * of_q[:, None]
    if CHANNELS:
        i = tl.arange(0, SIZE)
        g = rows_of(decay, token, KEY_SIZE, 0, c, live, KEY_SIZE)
        gain = tl.exp(tl.cumsum(g, 0))
        for one in range(SIZE):
            key_of = tl.sum(tl.where((i == one)[:, None], key, 0.0), 0)
            between = tl.cumsum(tl.where((i > one)[:, None], g, 0.0), 0)
            keys = tl.where((i >= one)[:, None], tl.exp(between) * key_of[None, :], 0.0)
            column = (i == one)[None, :]
            system += tl.where(column, tl.sum(key * keys, 1)[:, None], 0.0)
            scores += tl.where(column, tl.sum(query * keys, 1)[:, None], 0.0)
    else:
        system = tl.dot(key, tl.trans(key), system, input_precision=PRECISION)
        scores = tl.dot(query, tl.trans(key), scores, input_precision=PRECISION)
    known = tl.dot(key * gain, state, known, input_precision=PRECISION)
    found = tl.dot(query * gain, state, found, input_precision=PRECISION)
    return system, scores, known, found


@triton.jit
def written_tile(
    state: tl.tensor,  # [TILE, COLUMNS]
    new: tl.tensor,  # [SIZE, COLUMNS]: V'
    k: tl.tensor,  # these as in read_tile
    decay: tl.tensor,
    k_row: tl.tensor,
    first: tl.tensor,
    of_k: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    live: tl.tensor,
    later: tl.tensor,  # [SIZE]: another token of the piece follows
    late: tl.tensor,  # [SIZE, 1]: e^(G_C - G), for decays of heads
    kept: tl.tensor,  # e^(G_C)
    c: tl.tensor,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """The tile of the state after the piece."""
    key = rows_of(k, row, k_row, first, c, live, KEY_SIZE) * of_k[:, None]
    if CHANNELS:
        after = rows_of(decay, token + VALUE_HEADS, KEY_SIZE, 0, c, later, KEY_SIZE)
        late = tl.exp(tl.cumsum(after, 0, reverse=True))
        kept = tl.exp(tl.sum(rows_of(decay, token, KEY_SIZE, 0, c, live, KEY_SIZE), 0))[:, None]
    return tl.dot(tl.trans(key * late), new, kept * state, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens"])
def delta_chunk_kernel(
    q: tl.tensor,  # [T, key_heads, KEY_SIZE], heads side by side
    k: tl.tensor,
    v: tl.tensor,  # [T, VALUE_HEADS, VALUE_SIZE], heads side by side
    decay: tl.tensor,  # [T, VALUE_HEADS] or [T, VALUE_HEADS, KEY_SIZE], dense
    rate: tl.tensor,  # [T, VALUE_HEADS], dense
    out: tl.tensor,  # [T, VALUE_HEADS, VALUE_SIZE], dense, written
    memory: tl.tensor,  # [num_blocks, block] float32, written
    pieces: tl.tensor,  # see places
    read: tl.tensor,  # [groups] int64
    write: tl.tensor,  # [groups] int64
    fresh: tl.tensor,  # [1] uint8, with BEGINS only
    num_tokens: tl.tensor,
    q_row: tl.tensor,  # strides, elements
    k_row: tl.tensor,
    v_row: tl.tensor,
    block: tl.tensor,
    VALUE_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of a key head
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    K: tl.constexpr,  # KEY_SIZE as a power of two: TILE, or twice TILE
    TILE: tl.constexpr,  # rows of the state
    COLUMNS: tl.constexpr,  # of a program
    PIECES: tl.constexpr,  # of a state
    CHANNELS: tl.constexpr,  # a decay for each channel of the key
    BEGINS: tl.constexpr,  # `fresh` says whether the request begins
    SIZE: tl.constexpr,  # tokens of a piece
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """Grid (VALUE_HEADS, ceil(VALUE_SIZE / COLUMNS))."""
    TWO: tl.constexpr = K > TILE
    head = tl.program_id(0)
    i, c, j = tl.arange(0, SIZE), tl.arange(0, TILE), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_columns = (j < VALUE_SIZE)[None, :]
    goes_on = of_columns
    if BEGINS:
        goes_on = of_columns & (tl.load(fresh) == 0)
    element = (head * KEY_SIZE + c)[:, None] * VALUE_SIZE + j[None, :]
    low = tl.load(
        places(memory, read, pieces, block, element, PIECES), mask=(c < KEY_SIZE)[:, None] & goes_on, other=0.0
    )
    if TWO:
        high = tl.load(
            places(memory, read, pieces, block, element + TILE * VALUE_SIZE, PIECES),
            mask=(TILE + c < KEY_SIZE)[:, None] & goes_on,
            other=0.0,
        )
    first = head // GROUP * KEY_SIZE
    before, own = i[:, None] > i[None, :], i[:, None] == i[None, :]
    for begin in range(0, num_tokens, SIZE):
        row = (begin + i).to(tl.int64)
        live = row < num_tokens  # tokens behind the last one are zeros, which leave the state as it is
        later = (row + 1 < num_tokens) & (i + 1 < SIZE)
        token = row * VALUE_HEADS + head
        of_q = one_over_length(q, row, q_row, first, live, KEY_SIZE, K, EPS) * KEY_SIZE**-0.5
        of_k = one_over_length(k, row, k_row, first, live, KEY_SIZE, K, EPS)
        b = tl.load(rate + token, mask=live, other=0.0).to(tl.float32)
        gain, late, kept = tl.zeros([SIZE, 1], tl.float32), tl.zeros([SIZE, 1], tl.float32), 0.0
        if not CHANNELS:
            g = tl.load(decay + token, mask=live, other=0.0)
            after = tl.load(decay + token + VALUE_HEADS, mask=later, other=0.0)
            gain, late = tl.exp(tl.cumsum(g, 0))[:, None], tl.exp(tl.cumsum(after, 0, reverse=True))[:, None]
            kept = tl.exp(tl.sum(g, 0))
        system, scores = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
        known, found = tl.zeros([SIZE, COLUMNS], tl.float32), tl.zeros([SIZE, COLUMNS], tl.float32)
        system, scores, known, found = read_tile(
            system, scores, known, found, low, q, k, decay, q_row, k_row, first, of_q, of_k, row, token, live, gain, c,
            KEY_SIZE, CHANNELS, SIZE, PRECISION,
        )  # fmt: skip
        if TWO:
            system, scores, known, found = read_tile(
                system, scores, known, found, high, q, k, decay, q_row, k_row, first, of_q, of_k, row, token, live,
                gain, TILE + c, KEY_SIZE, CHANNELS, SIZE, PRECISION,
            )  # fmt: skip
        if not CHANNELS:
            between = tl.exp(tl.cumsum(tl.where(before, g[:, None], 0.0), 0))
            system, scores = system * between, tl.where(before | own, scores * between, 0.0)
        system = tl.where(before, b[:, None] * system, 0.0)
        inverse = tl.where(own, 1.0, 0.0)  # of I + system
        for one in range(1, SIZE):
            of_row = tl.sum(tl.where((i == one)[:, None], system, 0.0), 0)
            less = tl.sum(of_row[:, None] * inverse, 0)
            inverse = tl.where((i == one)[:, None], inverse - less[None, :], inverse)
        value = rows_of(v, row, v_row, head * VALUE_SIZE, j, live, VALUE_SIZE)
        new = tl.dot(inverse, b[:, None] * (value - known), input_precision=PRECISION)
        found = tl.dot(scores, new, found, input_precision=PRECISION)
        place = out + token[:, None] * VALUE_SIZE + j[None, :]
        tl.store(place, found.to(out.dtype.element_ty), mask=live[:, None] & of_columns)
        low = written_tile(
            low, new, k, decay, k_row, first, of_k, row, token, live, later, late, kept, c,
            VALUE_HEADS, KEY_SIZE, CHANNELS, PRECISION,
        )  # fmt: skip
        if TWO:
            high = written_tile(
                high, new, k, decay, k_row, first, of_k, row, token, live, later, late, kept, TILE + c,
                VALUE_HEADS, KEY_SIZE, CHANNELS, PRECISION,
            )  # fmt: skip
    tl.store(places(memory, write, pieces, block, element, PIECES), low, mask=(c < KEY_SIZE)[:, None] & of_columns)
    if TWO:
        tl.store(
            places(memory, write, pieces, block, element + TILE * VALUE_SIZE, PIECES),
            high,
            mask=(TILE + c < KEY_SIZE)[:, None] & of_columns,
        )
