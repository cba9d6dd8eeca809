"""Copies tokens between blocks of two forms: exactly between equal types, else through float32.

A *row* is the key or the value of one token and head, [head_size], as in attention/codes.py. Between types, floats are
rounded to nearest even; a quantized type gets a new scale for each row, exactly as if the node had computed these
values itself. So float32 -> any type -> float32 leaves what the narrower type leaves, and bfloat16 or float16 ->
float32 -> back is exact. Codes become code * scale, in float32.
"""

from __future__ import annotations

from torch import Tensor

from attention.codes import codes_of, encode_rows, from_codes, is_quantized, scales_of


def copy_rows(source: Tensor, first: int, target: Tensor, start: int, count: int) -> None:
    """Copy rows [first, first + count) of `source` to [start, start + count) of `target`: both [..., block_size,
    head_size] with the same other axes and head_size, views of pools as attention.codes.pool_in makes them."""
    here, there = slice(first, first + count), slice(start, start + count)
    if source.dtype == target.dtype:
        for mine, theirs in zip(_parts(source), _parts(target), strict=True):
            theirs[..., there, :] = mine[..., here, :]
        return
    parts = [part[..., here, :] for part in _parts(source)]
    rows = from_codes(parts[0], source.dtype).mul_(parts[1]) if len(parts) == 2 else parts[0].float()
    new = encode_rows(rows, target.dtype) if is_quantized(target) else (rows,)
    for theirs, values in zip(_parts(target), new, strict=True):
        theirs[..., there, :] = values


def _parts(kv: Tensor) -> tuple[Tensor, ...]:
    """The memory of kv [..., block_size, head_size] as tensors [..., block_size, n]: floats, or codes and scales."""
    return (codes_of(kv), scales_of(kv)) if is_quantized(kv) else (kv,)
