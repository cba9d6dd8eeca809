"""The `cpu` backend: C++ kernels that read K and V where they lie in the pool.

    decode.cpp   rows of one token: split over (request, KV head, run of keys), a dot product per key
    prefill.cpp  chunks: flash attention with queries as lanes (flash.h), AMX tiles where the CPU has them
    rotary.cpp   rotary embedding of q in place, rotated k and v straight into the pool

bfloat16 rows over a bfloat16 pool are multiplied as bfloat16 pairs and summed in float32. Every other pair of float32,
bfloat16 and float16 is computed in float32. The rotary embedding is computed in float32 and rounded once.

Threads: torch.get_num_threads() at each call, in torch's own OpenMP pool.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.cpu.library import DTYPES, Attend, Pool, Write, best_level, library
from attention.interface import RaggedBatch

MAX_HEAD_SIZE = 1024


@dataclass(slots=True)
class Plan:
    """The batch's index tensors as the kernels want them."""

    cu_q: Tensor  # [S + 1] int32
    ctx_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32, rows contiguous
    slots: Tensor  # [T] int64
    parts: list[tuple[bool, int, int]]  # (are decodes, first request, last request), empty ones left out


class CpuBackend:
    """float32, bfloat16, float16 on x86 with AVX2 or better; head sizes that are multiples of 16."""

    name = "cpu"

    def __init__(self, level: str | None = None) -> None:
        """level: see attention.cpu.library.LEVELS; None = the best one. Raises Unavailable."""
        self.level = level or best_level()
        self.library = library(self.level)

    def plan(self, batch: RaggedBatch) -> Plan:
        decodes, requests = batch.num_decodes, batch.num_requests
        return Plan(
            batch.cu_q.to(torch.int32).contiguous(),
            batch.ctx_lens.to(torch.int32).contiguous(),
            batch.block_tables.to(torch.int32).contiguous(),
            batch.slot_mapping.to(torch.int64).contiguous(),
            [part for part in ((True, 0, decodes), (False, decodes, requests)) if part[1] < part[2]],
        )

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan) -> None:
        self._write(k, v, kv, plan)

    def rotate_and_write_kv(
        self, qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan
    ) -> Tensor:
        """See AttentionBackend. q is rotated where it lies: the result is a view of qkv."""
        num_kv_heads = kv.shape[2]
        q: Tensor
        q, k, v = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, -num_kv_heads:]
        self._write(k, v, kv, plan, (q, cos.float().contiguous(), sin.float().contiguous()))
        return q

    def _write(
        self, k: Tensor, v: Tensor, kv: Tensor, plan: Plan, rotated: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> None:
        check_rows(k, kv)
        check_rows(v, kv)
        call = Write(kv=pool_of(kv), k=k.data_ptr(), v=v.data_ptr(), slots=plan.slots.data_ptr())
        call.k_row, call.k_head, call.v_row, call.v_head = *k.stride()[:2], *v.stride()[:2]
        call.num_tokens, call.threads, call.dtype = len(k), torch.get_num_threads(), DTYPES[k.dtype]
        if rotated is not None:
            q, cos, sin = rotated
            call.q, call.cos, call.sin = q.data_ptr(), cos.data_ptr(), sin.data_ptr()
            call.q_row, call.q_head, call.num_heads = *q.stride()[:2], q.shape[1]
        self.library.mooncake_write(ctypes.byref(call))

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        batch: RaggedBatch,
        plan: Plan,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        check_rows(q, kv)
        if scale <= 0 or window < 0 or soft_cap < 0:
            raise ValueError(f"needs scale > 0, window and soft_cap >= 0, not {scale}, {window}, {soft_cap}")
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        call = Attend(kv=pool_of(kv), q=q.data_ptr(), out=out.data_ptr())
        call.block_tables, call.table_row = plan.block_tables.data_ptr(), plan.block_tables.shape[1]
        call.cu_q, call.ctx_lens = plan.cu_q.data_ptr(), plan.ctx_lens.data_ptr()
        call.q_row, call.q_head, call.num_heads = *q.stride()[:2], q.shape[1]
        call.dtype, call.threads = DTYPES[q.dtype], torch.get_num_threads()
        call.scale, call.window, call.soft_cap = scale, window, soft_cap
        for are_decodes, first, last in plan.parts:
            call.first, call.last = first, last
            kernel = self.library.mooncake_decode if are_decodes else self.library.mooncake_prefill
            kernel(ctypes.byref(call))
        return out


def pool_of(kv: Tensor) -> Pool:
    """kv [num_blocks, 2, num_kv_heads, block_size, head_size], strided, the last axis contiguous."""
    if kv.dtype not in DTYPES or kv.stride(4) != 1:
        raise ValueError(f"the cpu backend needs a float KV pool with contiguous heads, not {kv.dtype} {kv.stride()}")
    return Pool(kv.data_ptr(), *kv.stride()[:4], *kv.shape[2:], DTYPES[kv.dtype])


def check_rows(rows: Tensor, kv: Tensor) -> None:
    """rows [T, heads, head_size]: q, k or v for this pool. Raises ValueError for what no kernel takes."""
    size, num_kv_heads = kv.shape[4], kv.shape[2]
    if rows.device.type != "cpu" or rows.dtype not in DTYPES:
        raise ValueError(f"the cpu backend has no kernel for {rows.dtype} on {rows.device}; choose torch")
    check_head_size(size)
    if rows.shape[2] != size or rows.stride(2) != 1 or rows.shape[1] % num_kv_heads:
        raise ValueError(f"rows {list(rows.shape)}, strides {rows.stride()}, do not fit a pool {list(kv.shape)}")


def check_head_size(size: int) -> None:
    if size % 16 or not 0 < size <= MAX_HEAD_SIZE:
        raise ValueError(f"attention backend 'cpu' has no kernel for head size {size}, no multiple of 16; choose torch")
