"""The memory layout of weights in groups of inputs for products/group_product.py: the bits of a GGUF file.

A matrix [N, K] in one of GGUF's types is divided into planes, one row for each output, so that a program reads many
adjacent bytes of each. No bit of a code is moved within its byte:

    codes    chunks of HALF bytes: byte h of chunk c has the low 4 bits of input 2 HALF c + h and, in its high half,
             those of input 2 HALF c + HALF + h. q8_0: one signed byte for each input, chunks of 32
    high     the bits above 4 (q5_k: 1, q6_k: 2): input k's are in byte k // SPAN * 32 + k % 32, from bit
             HIGH_BITS (k % SPAN // 32) on
    scales   d of BLOCK inputs: float16, or for mxfp4 a byte, 2^(byte - 127)
    minima   m of BLOCK inputs: float16
    factors  s of GROUP inputs: signed bytes; moves: t of GROUP inputs: the same

    w = d s (q - OFFSET) + m t        s and t are 1 without factors, m is 0 without minima
    w = d e2m1(q)                     mxfp4

Planes take the bytes of the file, and 1/8 bit more for each input of q4_k and q5_k, whose s and t have 6 bits there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The numbers of a type; see above."""

    half: int
    parts: int = 2  # inputs in a byte of codes
    group: int = 32
    block: int = 32
    offset: int = 0
    minima: bool = False
    factors: bool = False
    high_bits: int = 0
    span: int = 256
    floats: bool = False  # codes are E2M1, scales E8M0


LAYOUTS = {
    "q8_0": Layout(32, parts=1),
    "q4_0": Layout(16, offset=8),
    "q4_1": Layout(16, minima=True),
    "q4_k": Layout(32, block=256, minima=True, factors=True),
    "q5_k": Layout(32, block=256, minima=True, factors=True, high_bits=1),
    "q6_k": Layout(64, block=256, group=16, offset=32, factors=True, high_bits=2, span=128),
    "mxfp4": Layout(16, floats=True),
}
"""By the kinds of engine/model/ops/quantized.py."""


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """A matrix [outputs, inputs]. A plane that its type lacks is `codes`, which is not read in its place."""

    layout: Layout
    outputs: int
    inputs: int
    codes: Tensor  # uint8, int8 for q8_0
    high: Tensor  # uint8
    scales: Tensor  # float16; uint8 for mxfp4
    minima: Tensor  # float16
    factors: Tensor  # int8
    moves: Tensor  # int8

    @property
    def nbytes(self) -> int:
        planes = (self.codes, self.high, self.scales, self.minima, self.factors, self.moves)
        return sum({id(plane): plane.nbytes for plane in planes}.values())


def planes_of(kind: str, blocks: Tensor, inputs: int) -> Planes:
    """blocks uint8 [N, inputs / block * bytes of a block] of a GGUF type -> its planes, on the same device."""
    layout, outputs = LAYOUTS[kind], len(blocks)
    whole = blocks.view(outputs, inputs // layout.block, -1)

    def plane(begin: int, end: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return whole[..., begin:end].contiguous().view(dtype).view(outputs, -1)

    half = torch.float16
    if kind == "q8_0":
        codes = plane(2, 34, torch.int8)
        found = {"scales": plane(0, 2, half)}
    elif kind in ("q4_0", "q4_1"):
        codes = plane(whole.shape[2] - 16, whole.shape[2])
        found = {"scales": plane(0, 2, half)} | ({"minima": plane(2, 4, half)} if layout.minima else {})
    elif kind == "mxfp4":
        codes = plane(1, 17)
        found = {"scales": plane(0, 1)}
    elif kind == "q6_k":
        codes = plane(0, 128)
        found = {"high": plane(128, 192), "factors": plane(192, 208, torch.int8), "scales": plane(208, 210, half)}
    else:
        factors, moves = six_bits(whole[..., 4:16])
        codes = plane(whole.shape[2] - 128, whole.shape[2])
        found = {"scales": plane(0, 2, half), "minima": -plane(2, 4, half)}
        found |= {"factors": factors.view(outputs, -1), "moves": moves.view(outputs, -1)}
        found |= {"high": plane(16, 48)} if kind == "q5_k" else {}
    names = ("high", "scales", "minima", "factors", "moves")
    return Planes(layout, outputs, inputs, codes, *(found.get(name, codes) for name in names))


def six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [..., 12] of a block -> s and t of its eight groups, int8 [..., 8] each."""
    first, second, third = packed.chunk(3, -1)
    s = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1)
    t = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), -1)
    return s.to(torch.int8), t.to(torch.int8)
