"""Random weights in every type that ops/quantized.py has, and their values in float64, decoded here from the
definitions of the formats: the machine of gpu-check need not have the gguf package."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.ops.quantized import BLOCKS, SHARED, Quantized, Scaled
from tests.attention.interpreted.cases import DEVICE

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def quantized(kind: str, outputs: int, blocks: int, seed: int, dtype: torch.dtype) -> tuple[Quantized, Tensor]:
    """A matrix on DEVICE whose values are about 0.1 to 1, any byte in its codes."""
    generator = torch.Generator().manual_seed(seed)
    inputs, nbytes = BLOCKS[kind]
    stored = torch.randint(0, 256, (outputs, blocks, nbytes), generator=generator, dtype=torch.uint8)
    typical = {"q8_0": 0.005, "q6_k": 0.0005}.get(kind, 0.002 if inputs == 256 else 0.05)
    numbers = torch.randn(outputs, blocks, 2, generator=generator).mul(typical).half().view(torch.uint8)
    if kind == "mxfp4":
        stored[..., 0] = torch.randint(121, 126, (outputs, blocks), generator=generator)
    elif kind == "q6_k":
        stored[..., -2:] = numbers[..., :2]
    else:
        width = 4 if kind in ("q4_1", "q4_k", "q5_k") else 2
        stored[..., :width] = numbers[..., :width]
    weight = Quantized(kind, stored.view(outputs, -1), dtype)
    return weight.to(torch.device(DEVICE)), meant(kind, stored).to(DEVICE)


def meant(kind: str, stored: Tensor) -> Tensor:
    """uint8 [N, blocks, bytes of a block] -> float64 [N, K]."""
    values = {"q8_0": q8_0, "q4_0": q4_0, "q4_1": q4_1, "mxfp4": mxfp4, "q6_k": q6_k}.get(kind, k_type)(stored)
    return values.flatten(1)


def number(stored: Tensor, at: int) -> Tensor:
    return stored[..., at : at + 2].contiguous().view(torch.float16).double()


def nibbles(stored: Tensor, half: int) -> Tensor:
    """The low halves of `half` bytes, then their high halves, and so on."""
    chunks = stored.unflatten(-1, (-1, half))
    return torch.cat((chunks & 15, chunks >> 4), -1).flatten(-2).double()


def q8_0(stored: Tensor) -> Tensor:
    return number(stored, 0) * stored[..., 2:].contiguous().view(torch.int8).double()


def q4_0(stored: Tensor) -> Tensor:
    return number(stored, 0) * (nibbles(stored[..., 2:], 16) - 8)


def q4_1(stored: Tensor) -> Tensor:
    return number(stored, 0) * nibbles(stored[..., 4:], 16) + number(stored, 2)


def mxfp4(stored: Tensor) -> Tensor:
    return E2M1[nibbles(stored[..., 1:], 16).long()] * 2.0 ** (stored[..., :1].double() - 127)


def k_type(stored: Tensor) -> Tensor:
    """q4_k and q5_k."""
    s, values = stored[..., 4:16].int(), nibbles(stored[..., -128:], 32).unflatten(-1, (8, 32))
    groups = []
    for j in range(8):
        if j < 4:
            scale, move = s[..., j] & 63, s[..., j + 4] & 63
        else:
            scale = (s[..., j + 4] & 15) | (s[..., j - 4] >> 6) << 4
            move = (s[..., j + 4] >> 4) | (s[..., j] >> 6) << 4
        q = values[..., j, :]
        if stored.shape[-1] == 176:  # q5_k
            q = q + 16 * (stored[..., 16:48] >> j & 1)
        groups.append(number(stored, 0) * scale[..., None] * q - number(stored, 2) * move[..., None])
    return torch.cat(groups, -1)


def q6_k(stored: Tensor) -> Tensor:
    groups = []
    for half in range(2):
        low, high = stored[..., 64 * half : 64 * half + 64], stored[..., 128 + 32 * half : 160 + 32 * half]
        for g in range(4):
            part = low[..., 32 * (g % 2) : 32 * (g % 2) + 32]
            q = (part & 15 if g < 2 else part >> 4) | (high >> 2 * g & 3) << 4
            scales = stored[..., 192 + 8 * half + 2 * g :][..., :2].contiguous().view(torch.int8).double()
            groups.append(number(stored, 208) * scales.repeat_interleave(16, -1) * (q.double() - 32))
    return torch.cat(groups, -1)


def scaled(kind: str, outputs: int, inputs: int, seed: int, dtype: torch.dtype) -> tuple[Scaled, Tensor]:
    """As `quantized`; any codes but NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    shared = SHARED[kind] or inputs
    scales = torch.rand(outputs, -(-inputs // shared), generator=generator).add(0.1) / 128
    codes[(codes & 0x7F) == 0x7F] = 0x80 if kind == "fp8" else 0x7F
    wide = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).double()
    values = wide * scales.double().repeat_interleave(shared, 1)[:, :inputs]
    return Scaled(kind, codes, scales, dtype).to(torch.device(DEVICE)), values.to(DEVICE)
