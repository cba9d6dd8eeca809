"""KV blocks in four bits per element on a CPU, for the pool (--pool-dtype int4).

Each group of elements has its own smallest value and step, so that 16 codes span exactly what the group holds:

    step = (max - min) / 15      code = round((x - min) / step)      x' = min + step code

so |x - x'| <= step / 2, plus the rounding of min and step to float16 (2^-11 of the larger of |min| and the span).
Values beyond float16's largest, 65504, come back as that.

Keys have channels that are large for all tokens, and values do not (KIVI, arXiv 2402.02750): a group of keys is one
channel of up to 32 tokens of the block, a group of values up to 32 channels of one token. A latent row has groups of
channels too, because most of it is used as a value. One layer of an encoded block, with halves of a row in one byte:

    (min, step) of each group float16, keys before values | codes [planes, num_kv_heads, block_size, head_size / 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

GROUP_MAX = 32  # elements
LEVELS = 15
LARGEST = 65504.0


def encode_layers(layers: Tensor) -> Tensor:
    """layers [n, planes, num_kv_heads, block_size, head_size] float32, finite, overwritten; head_size even. Returns [n,
    encoded bytes of a layer] uint8."""
    half = layers.shape[-1] // 2
    bounds, codes = [], []
    for plane, values in enumerate(layers.unbind(1)):
        grouped, axis = _grouped(values, plane, layers.shape[1])
        least, most = grouped.aminmax(dim=axis, keepdim=True)
        low = least.clamp(-LARGEST, LARGEST).half()
        step = (most - least).div_(LEVELS).clamp_(max=LARGEST).half()
        wide = step.float()
        grouped.sub_(low.float()).mul_(torch.where(wide == 0, 1.0, wide).reciprocal_())
        whole = values.add_(0.5).clamp_(0, LEVELS).to(torch.uint8)
        codes.append((whole[..., half:] << 4 | whole[..., :half]).flatten(1))
        bounds += [low.flatten(1), step.flatten(1)]
    return torch.cat((torch.cat(bounds, 1).view(torch.uint8), *codes), 1)


def decode_layers(encoded: Tensor, shape: Sequence[int]) -> Tensor:
    """The reverse: encoded [n, encoded bytes of a layer] uint8, shape (planes, num_kv_heads, block_size, head_size).
    Returns [n, *shape] float32."""
    planes, heads, block_size, head_size = shape
    out = torch.empty(len(encoded), *shape)
    counts = [_groups(plane, shape) for plane in range(planes)]
    bound_bytes = 4 * sum(map(prod, counts))
    bounds = encoded[:, :bound_bytes].clone(memory_format=torch.contiguous_format).view(torch.float16).float()
    codes = encoded[:, bound_bytes:].view(len(encoded), planes, heads, block_size, head_size // 2)
    at = 0
    for plane, (values, groups) in enumerate(zip(out.unbind(1), counts, strict=True)):
        values[..., : head_size // 2] = codes[:, plane] & 15
        values[..., head_size // 2 :] = codes[:, plane] >> 4
        grouped, axis = _grouped(values, plane, planes)
        low, step = bounds[:, at : at + 2 * prod(groups)].view(len(encoded), 2, *groups).unbind(1)
        grouped.mul_(step.unsqueeze(axis)).add_(low.unsqueeze(axis))
        at += 2 * prod(groups)
    return out


def _grouped(values: Tensor, plane: int, planes: int) -> tuple[Tensor, int]:
    """(values [n, num_kv_heads, block_size, head_size] with groups apart, the axis of a group's elements)"""
    n, heads, block_size, head_size = values.shape
    if _by_channel(plane, planes):
        size = group_size(block_size)
        return values.view(n, heads, block_size // size, size, head_size), 3
    size = group_size(head_size)
    return values.view(n, heads, block_size, head_size // size, size), 4


def _groups(plane: int, shape: Sequence[int]) -> tuple[int, int, int]:
    """The numbers of groups along heads, tokens and channels."""
    planes, heads, block_size, head_size = shape
    if _by_channel(plane, planes):
        return heads, block_size // group_size(block_size), head_size
    return heads, block_size, head_size // group_size(head_size)


def _by_channel(plane: int, planes: int) -> bool:
    """Whether a group is one channel of many tokens: those of keys."""
    return planes == 2 and plane == 0


def group_size(length: int) -> int:
    """Elements of a group along an axis of `length`: its largest divisor up to GROUP_MAX."""
    return next(size for size in range(min(length, GROUP_MAX), 0, -1) if length % size == 0)
