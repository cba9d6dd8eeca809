"""Many tokens of one request, in pieces of PIECE tokens: the chunkwise form of the gated delta rule with its WY
representation (arXiv 2412.06464, section 3.3 and appendix A), for a decay of each head or of each channel of the key.

The formulas are those of attention/delta_rule.py. A program has some columns of the matrix of one head in registers,
and takes the pieces one after another:

    V' = (I + A)^-1 b (V - (e^G K) S)      O = (e^G Q) S + (Q, K) V'      S <- e^(G_C) S + (e^(G_C - G) K)^T V'

The inverse [PIECE, PIECE] is found row by row. With a decay for each channel, e^(G_ic - G_jc) is computed for one j at
a time, because its two factors would overflow. We have not measured this kernel on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.triton.delta.places import places, unit

PIECE = 16
"""Tokens: the smallest matrix of a tensor core."""


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
    K: tl.constexpr,  # KEY_SIZE as a power of two
    COLUMNS: tl.constexpr,  # of a program
    PIECES: tl.constexpr,  # of a state
    CHANNELS: tl.constexpr,  # a decay for each channel of the key
    BEGINS: tl.constexpr,  # `fresh` says whether the request begins
    SIZE: tl.constexpr,  # tokens of a piece
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """Grid (VALUE_HEADS, ceil(VALUE_SIZE / COLUMNS))."""
    head = tl.program_id(0)
    c, j, i = tl.arange(0, K), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SIZE)
    element = (head * KEY_SIZE + c).to(tl.int64)[:, None] * VALUE_SIZE + j[None, :]
    mine = (c < KEY_SIZE)[:, None] & (j < VALUE_SIZE)[None, :]
    held = mine
    if BEGINS:
        held = mine & (tl.load(fresh) == 0)
    state = tl.load(places(memory, read, pieces, block, element, PIECES), mask=held, other=0.0)
    before, own = i[:, None] > i[None, :], i[:, None] == i[None, :]
    for first in range(0, num_tokens, SIZE):
        row = (first + i).to(tl.int64)
        live = row < num_tokens  # tokens behind the last one are zeros, which leave the state as it is
        of_key, of_value = live[:, None] & (c < KEY_SIZE)[None, :], live[:, None] & (j < VALUE_SIZE)[None, :]
        place = head // GROUP * KEY_SIZE + c
        query = tl.load(q + row[:, None] * q_row + place[None, :], mask=of_key, other=0.0).to(tl.float32)
        query = unit(query, EPS) * KEY_SIZE**-0.5
        key = unit(tl.load(k + row[:, None] * k_row + place[None, :], mask=of_key, other=0.0).to(tl.float32), EPS)
        place = head * VALUE_SIZE + j
        value = tl.load(v + row[:, None] * v_row + place[None, :], mask=of_value, other=0.0).to(tl.float32)
        token = row * VALUE_HEADS + head
        b = tl.load(rate + token, mask=live, other=0.0).to(tl.float32)
        if CHANNELS:
            g = tl.load(decay + token[:, None] * KEY_SIZE + c[None, :], mask=of_key, other=0.0)
            total, last = tl.cumsum(g, 0), tl.sum(g, 0)
            gain, late, kept = tl.exp(total), tl.exp(last[None, :] - total), tl.exp(last)[:, None]
            system, scores = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
            for one in range(SIZE):
                chosen = (i == one)[:, None]
                key_of, total_of = tl.sum(tl.where(chosen, key, 0.0), 0), tl.sum(tl.where(chosen, total, 0.0), 0)
                between = tl.where((i >= one)[:, None], total - total_of[None, :], float("-inf"))
                keys = tl.exp(between) * key_of[None, :]
                column = (i == one)[None, :]
                system = tl.where(column, tl.sum(key * keys, 1)[:, None], system)
                scores = tl.where(column, tl.sum(query * keys, 1)[:, None], scores)
        else:
            g = tl.load(decay + token, mask=live, other=0.0)
            total, last = tl.cumsum(g, 0), tl.sum(g, 0)
            gain, late, kept = tl.exp(total)[:, None], tl.exp(last - total)[:, None], tl.exp(last)
            between = tl.exp(tl.where(before | own, total[:, None] - total[None, :], float("-inf")))
            system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * between
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
        system = tl.where(before, b[:, None] * system, 0.0)
        inverse = tl.where(own, 1.0, 0.0)  # of I + system
        for one in range(1, SIZE):
            of_row = tl.sum(tl.where((i == one)[:, None], system, 0.0), 0)
            less = tl.sum(of_row[:, None] * inverse, 0)
            inverse = tl.where((i == one)[:, None], inverse - less[None, :], inverse)
        wrong = b[:, None] * (value - tl.dot(key * gain, state, input_precision=PRECISION))
        new = tl.dot(inverse, wrong, input_precision=PRECISION)
        found = tl.dot(query * gain, state, input_precision=PRECISION)
        found += tl.dot(scores, new, input_precision=PRECISION)
        tl.store(out + token[:, None] * VALUE_SIZE + j[None, :], found.to(out.dtype.element_ty), mask=of_value)
        state = kept * state + tl.dot(tl.trans(key * late), new, input_precision=PRECISION)
    tl.store(places(memory, write, pieces, block, element, PIECES), state, mask=mine)
