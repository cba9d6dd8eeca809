"""One token of each request: the recurrence of attention/delta_rule.py, on the state where it lies.

A program has some columns of the matrix of one head, which do not depend on the others. It reads them once and writes
them once. We have not measured this kernel on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.triton.delta.places import places, unit


@triton.jit
def delta_step_kernel(
    q: tl.tensor,  # [N, key_heads, KEY_SIZE], heads side by side
    k: tl.tensor,
    v: tl.tensor,  # [N, VALUE_HEADS, VALUE_SIZE], heads side by side
    decay: tl.tensor,  # [N, VALUE_HEADS] or [N, VALUE_HEADS, KEY_SIZE], dense
    rate: tl.tensor,  # [N, VALUE_HEADS], dense
    out: tl.tensor,  # [N, VALUE_HEADS, VALUE_SIZE], dense, written
    memory: tl.tensor,  # [num_blocks, block] float32, written
    pieces: tl.tensor,  # see places
    read: tl.tensor,  # [N, groups] int64
    write: tl.tensor,  # [N, groups] int64
    fresh: tl.tensor,  # [N] uint8
    q_row: tl.tensor,  # strides, elements
    k_row: tl.tensor,
    v_row: tl.tensor,
    block: tl.tensor,
    groups: tl.tensor,
    VALUE_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of a key head
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    K: tl.constexpr,  # KEY_SIZE as a power of two
    COLUMNS: tl.constexpr,  # of a program
    PIECES: tl.constexpr,
    CHANNELS: tl.constexpr,  # a decay for each channel of the key
    EPS: tl.constexpr,
) -> None:
    """Grid (VALUE_HEADS, ceil(VALUE_SIZE / COLUMNS), N)."""
    head, n = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c, j = tl.arange(0, K), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_key, of_value = c < KEY_SIZE, j < VALUE_SIZE
    key = head // GROUP * KEY_SIZE + c
    query = unit(tl.load(q + n * q_row + key, mask=of_key, other=0.0).to(tl.float32)[None, :], EPS)
    query = tl.reshape(query, [K]) * KEY_SIZE**-0.5
    key = tl.reshape(unit(tl.load(k + n * k_row + key, mask=of_key, other=0.0).to(tl.float32)[None, :], EPS), [K])
    value = tl.load(v + n * v_row + head * VALUE_SIZE + j, mask=of_value, other=0.0).to(tl.float32)
    token = n * VALUE_HEADS + head

    element = (head * KEY_SIZE + c)[:, None] * VALUE_SIZE + j[None, :]
    mine = of_key[:, None] & of_value[None, :]
    goes_on = tl.load(fresh + n) == 0
    state = tl.load(places(memory, read + n * groups, pieces, block, element, PIECES), mask=mine & goes_on, other=0.0)
    if CHANNELS:
        state *= tl.exp(tl.load(decay + token * KEY_SIZE + c, mask=of_key, other=0.0))[:, None]
    else:
        state *= tl.exp(tl.load(decay + token))
    known = tl.sum(state * key[:, None], 0)
    state += key[:, None] * (tl.load(rate + token).to(tl.float32) * (value - known))[None, :]
    tl.store(places(memory, write + n * groups, pieces, block, element, PIECES), state, mask=mine)
    found = tl.sum(state * query[:, None], 0)
    tl.store(out + token * VALUE_SIZE + j, found.to(out.dtype.element_ty), mask=of_value)
