"""The gated delta rule of the Triton backend: one launch for the decodes of a layer, one for each chunk.

attention/delta_states.py has what a rule is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attention.delta_rule import EPS
from attention.delta_states import Tokens, check
from attention.states import Place
from attention.triton.delta.chunk import PIECE, delta_chunk_kernel
from attention.triton.delta.places import pieces_of, width_of
from attention.triton.delta.step import delta_step_kernel

TILE, MOST_KEYS = 64, 128
"""Rows of the state in one tile of a chunk's program, and in both: more do not fit into its registers."""

COLUMNS = 16
"""Of the state in a chunk's program: with more, its registers spill."""


class TritonRule:
    """float32, bfloat16 and float16; keys of up to MOST_KEYS elements."""

    name = "triton"

    def step(self, tokens: Tokens, place: Place, read: Tensor, fresh: Tensor, write: Tensor, out: Tensor) -> None:
        rows, constants = _arguments(tokens, place, read, write, out)
        if len(read) != len(tokens.v):
            raise ValueError(f"{len(tokens.v)} tokens of {len(read)} requests: a step has one of each")
        columns = triton.cdiv(constants["VALUE_SIZE"], constants["COLUMNS"])
        delta_step_kernel[(constants["VALUE_HEADS"], columns, len(read))](
            *rows,
            pieces_of(place.slots, out.device),
            read.contiguous(),
            write.contiguous(),
            fresh.contiguous().view(torch.uint8),
            *_strides(tokens),
            place.memory.stride(0),
            read.shape[1],
            num_warps=4,
            **constants,
        )

    def chunk(
        self, tokens: Tokens, place: Place, read: Tensor, fresh: Tensor | None, write: Tensor, out: Tensor
    ) -> None:
        rows, constants = _arguments(tokens, place, read, write, out)
        if len(read) != 1:
            raise ValueError(f"a chunk is of one request, not of {len(read)}")
        constants |= {"COLUMNS": COLUMNS, "TILE": min(TILE, constants["K"])}
        delta_chunk_kernel[(constants["VALUE_HEADS"], triton.cdiv(constants["VALUE_SIZE"], COLUMNS))](
            *rows,
            pieces_of(place.slots, out.device),
            read.contiguous(),
            write.contiguous(),
            read if fresh is None else fresh.view(torch.uint8),
            len(tokens.v),
            *_strides(tokens),
            place.memory.stride(0),
            BEGINS=fresh is not None,
            SIZE=PIECE,
            PRECISION="tf32x3",  # about that of float32
            num_warps=8,
            **constants,
        )


def _arguments(
    tokens: Tokens, place: Place, read: Tensor, write: Tensor, out: Tensor
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The tensors up to the memory of the states, and the constants that both kernels have. Raises ValueError."""
    check(tokens, place, read, write, out)
    heads, key_size, value_size = tokens.matrix
    if key_size > MOST_KEYS:
        raise ValueError(
            f"the triton backend has no delta rule for keys of {key_size}; choose --attention-backend torch"
        )
    keys, columns = width_of(key_size, value_size)
    q, k, v = tokens.q, tokens.k, tokens.v
    if any(x.stride(2) != 1 or x.stride(1) != x.shape[2] for x in (q, k, v)):
        raise ValueError("the heads of q, k and v must lie side by side")
    constants = {
        "VALUE_HEADS": heads,
        "GROUP": heads // k.shape[1],
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "K": keys,
        "COLUMNS": columns,
        "PIECES": len(place.slots.pieces),
        "CHANNELS": tokens.decay.dim() == 3,
        "EPS": EPS,
    }
    return (q, k, v, tokens.decay.float().contiguous(), tokens.rate.contiguous(), out, place.memory), constants


def _strides(tokens: Tokens) -> tuple[int, int, int]:
    return tokens.q.stride(0), tokens.k.stride(0), tokens.v.stride(0)
