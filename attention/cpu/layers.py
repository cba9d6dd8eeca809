"""The attention of all layers of a step as a list of C calls, for a caller that runs them without the interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.cpu.backend import CpuBackend, Plan, attend_call, rotate_call
from attention.cpu.library import Attend, Write

WRITE: np.dtype[Any] = np.dtype(Write)
ATTEND: np.dtype[Any] = np.dtype(Attend)

Calls = np.ndarray[Any, np.dtype[np.uint64]]
"""[..., 2]: the address of a C function and that of its one argument."""


@dataclass(slots=True)
class Work:
    """The part common to the attention of all layers. All layers use the same memory: each reads and rotates qkv and
    writes out."""

    qkv: Tensor  # [T, num_heads + 2 num_kv_heads, head_size]
    num_heads: int
    kv_pool: Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]
    out: Tensor  # [T, num_heads, head_size], contiguous
    scale: float
    soft_cap: float


@dataclass(slots=True)
class AttentionCalls:
    """`calls` [num_layers, calls of a layer, 2]; the structs they point to must outlive them."""

    calls: Calls
    structs: tuple[np.ndarray[Any, Any], ...]


def attention_calls(
    backend: CpuBackend,
    work: Work,
    plan: Plan,
    windows: Sequence[int],
    angles: tuple[Tensor, Tensor],
    local_angles: tuple[Tensor, Tensor],
) -> AttentionCalls:
    """The calls that CpuBackend.rotate_and_write_kv and .attend would make, layer by layer. windows: per layer, 0 =
    none; layers with a window use local_angles; angles: cos and sin [T, head_size / 2] float32, contiguous.

    Raises ValueError for arguments that no kernel takes."""
    qkv, heads, pool = work.qkv, work.num_heads, work.kv_pool
    layer = pool[:, 0]
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in (*angles, *local_angles)):
        raise ValueError("angles must be contiguous float32")
    data = pool.data_ptr() + np.arange(pool.shape[1], dtype=np.uint64) * (pool.stride(1) * pool.element_size())
    at, head = qkv.data_ptr(), qkv.stride(1) * qkv.element_size()

    write = rotate_call(qkv, heads, layer, plan)
    write.q, write.k, write.v = at, at + heads * head, at + (heads + layer.shape[2]) * head
    writes = np.full(len(data), np.frombuffer(bytes(write), WRITE)[0])
    writes["kv"]["data"] = data
    local = np.array(windows) > 0
    writes["cos"] = np.where(local, local_angles[0].data_ptr(), angles[0].data_ptr())
    writes["sin"] = np.where(local, local_angles[1].data_ptr(), angles[1].data_ptr())

    attend = attend_call(qkv[:, :heads], layer, plan, work.scale, 0, work.soft_cap)
    attend.q, attend.out = at, work.out.data_ptr()
    attends = np.full((len(data), len(plan.parts)), np.frombuffer(bytes(attend), ATTEND)[0])
    attends["kv"]["data"], attends["window"] = data[:, None], np.array(windows)[:, None]

    calls = np.empty((len(data), 1 + len(plan.parts), 2), np.uint64)
    library = backend.library
    calls[:, 0, 0], calls[:, 0, 1] = address_of(library.mooncake_write), addresses(writes)
    calls[:, 1:, 1] = addresses(attends)
    for i, (are_decodes, first, last) in enumerate(plan.parts):
        attends["first"][:, i], attends["last"][:, i] = first, last
        calls[:, 1 + i, 0] = address_of(library.mooncake_decode if are_decodes else library.mooncake_prefill)
    return AttentionCalls(calls, (writes, attends))


def address_of(function: Any) -> int:
    """The address of a C function, for a Calls."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def addresses(structs: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The address of each element of a contiguous array."""
    offsets = np.arange(structs.size, dtype=np.uint64).reshape(structs.shape) * structs.itemsize
    return structs.ctypes.data + offsets
