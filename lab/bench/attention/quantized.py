"""The reference grid over quantized pools (attention/codes.py), for backends that read codes.

The rule of grid.py, with the decoded values in place of the pool: the reference backend over those values is the truth
in float64, and plain torch in the dtype under test. Slots that hold no token of the step have scales of NaN, and codes
of NaN if fp8 has one. Written k and v must be within the rounding bound of their type, in their slots and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention.codes import SCALE_BYTES, codes_of, is_quantized, planes, pool_in, rows_of, scales_of
from attention.interface import AttentionBackend, RaggedBatch
from attention.reference import ReferenceBackend
from attention.rotary import rotate
from lab.bench.attention.grid import SLACK, Case, Point, far_off, without_unseen


def quantized(pool: Tensor, kv_dtype: str) -> Tensor:
    """A pool [..., head_size] in `kv_dtype`; rows with NaN stay NaN when decoded."""
    row_bytes = pool.shape[-1] + SCALE_BYTES
    memory = torch.full((pool[..., 0].numel() * row_bytes,), 0xFF, dtype=torch.uint8, device=pool.device)
    out = pool_in(memory, pool.shape[1:], kv_dtype)
    held = ~pool.isnan().any(-1, keepdim=True)
    for plane, rows in planes(out, pool.nan_to_num(0.0)):
        plane.copy_(torch.where(held, rows, plane))
    return out


def values(pool: Tensor, dtype: torch.dtype) -> Tensor:
    """The decoded values of a quantized pool; the unchanged values of any other."""
    return rows_of(pool, lambda part: part, dtype)


def find_quantized_fault(backend: AttentionBackend, point: Point, kv_dtype: str, device: str = "cpu") -> str | None:
    """The fault at this point, in one line; None = correct. See grid.find_fault."""
    case, reference = Case.at(point, device), ReferenceBackend()
    mask: dict[str, Any] = {"window": point.window, "soft_cap": point.soft_cap}
    pool = quantized(case.pool, kv_dtype)
    if fault := _write_fault(backend, case, pool):
        return fault
    batch, kv = without_unseen(case.batch, point.window), pool[:, 1]
    plan = backend.plan(batch)
    backend.write_kv(case.k, case.v, kv, batch, plan)
    before = raw(pool)

    def of_reference(dtype: torch.dtype) -> Tensor:
        return reference.attend(case.q.to(dtype), values(kv, dtype), case.batch, None, case.scale, **mask).double()

    truth = of_reference(torch.float64)
    plain = float((of_reference(point.dtype) - truth).abs().max())
    ours = backend.attend(case.q, kv, batch, plan, case.scale, **mask)
    if fault := far_off(ours, truth, plain):
        return fault
    return None if torch.equal(raw(pool), before) else "attend changes the pool"


def raw(pool: Tensor) -> Tensor:
    """A copy of a quantized pool's bytes, codes before scales."""
    assert is_quantized(pool)
    return torch.cat((codes_of(pool).flatten(), scales_of(pool).contiguous().view(torch.int8).flatten()))


def _write_fault(backend: AttentionBackend, case: Case, pool: Tensor) -> str | None:
    """Checks both ways of writing; the last two rows are padding."""
    batch = replace(case.batch, slot_mapping=case.batch.slot_mapping.clone())
    if len(case.k) > 2:
        batch.slot_mapping[-2:] = -1
    heads, half = case.q.shape[1], case.q.shape[2] // 2
    angle = batch.positions[:, None] * 0.1 ** torch.arange(half, device=case.q.device)
    cos, sin = angle.cos().float(), angle.sin().float()
    written = pool_like(pool)
    backend.write_kv(case.k, case.v, written[:, 1], batch, backend.plan(batch))
    if fault := _misplaced(written, pool, batch, case.k.double(), case.v.double(), 0.0):
        return f"write_kv {fault}"
    turned = pool_like(pool)
    qkv = torch.cat((case.q, case.k, case.v), 1)
    backend.rotate_and_write_kv(qkv, heads, cos, sin, turned[:, 1], batch, backend.plan(batch))
    k = rotate(case.k.double(), cos[:, None].double(), sin[:, None].double())
    plain = rotate(case.k, cos[:, None].to(case.k.dtype), sin[:, None].to(case.k.dtype)).double()
    if fault := _misplaced(turned, pool, batch, k, case.v.double(), 2 * float((plain - k).abs().max()) + SLACK):
        return f"rotate_and_write_kv {fault}"
    return None


def pool_like(pool: Tensor) -> Tensor:
    """A copy with the same strides: `clone` would not keep the room for scales."""
    copy = quantized(
        torch.full(pool.shape, torch.nan, device=pool.device), "int8" if pool.dtype == torch.int8 else "fp8"
    )
    codes_of(copy).copy_(codes_of(pool))
    scales_of(copy).copy_(scales_of(pool))
    return copy


def _misplaced(
    written: Tensor, before: Tensor, batch: RaggedBatch, k: Tensor, v: Tensor, rounding: float
) -> str | None:
    """The fault unless the slots of layer 1 hold k and v [T, num_kv_heads, head_size] float64 and the rest is
    unchanged."""
    rows = torch.nonzero(batch.slot_mapping >= 0).flatten()
    slots = batch.slot_mapping[rows]
    block, offset = slots // batch.block_size, slots % batch.block_size

    def of_slots(plane: Tensor) -> Tensor:
        """[rows, 2, num_kv_heads, n]"""
        return plane[block, 1, :, :, offset]

    exact = torch.stack((k[rows], v[rows]), 1)
    scale = of_slots(scales_of(written)).double()
    bound = scale / 2 if before.dtype == torch.int8 else torch.maximum(exact.abs() / 16, scale / 1024)
    error = (rows_of(written, of_slots, torch.float64) - exact).abs()
    if not (error <= 1.0001 * bound + rounding).all():
        return f"is off by {float(error.max()):.2e}"
    expected = pool_like(before)
    for plane, ours in ((codes_of(expected), codes_of(written)), (scales_of(expected), scales_of(written))):
        plane[block, 1, :, :, offset] = of_slots(ours)
    return None if torch.equal(raw(written), raw(expected)) else "touches other slots than it is given"
