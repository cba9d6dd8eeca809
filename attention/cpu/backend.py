"""The `cpu` backend: C++ kernels that read K and V directly in the pool.

    decode.cpp   rows of one token: split over (request, KV head, run of keys); AMX tiles read K and V in place
                 (decode_amx.h), other CPUs compute a dot product per key (decode.h), of the pool's own elements:
                 nothing is copied
    prefill.cpp  chunks: flash attention with queries as lanes (flash.h), or AMX tiles if the CPU has them
    rotary.cpp   rotary embedding of q in place, rotated k and v straight into the pool
    delta/       the gated delta rule, on states in the pool (delta_rule.py)

bfloat16 rows over a bfloat16 pool are multiplied as bfloat16 pairs and summed in float32. So are prompts in bfloat16
over a quantized pool (codes.h), and with tiles also decodes; its values are rounded to bfloat16 when they are loaded.
On x86, other decodes of 16-bit rows over int8 codes are multiplied in 16-bit integers (decode_codes.h). All other
combinations are computed in float32. The rotary embedding is computed in float32 and rounded once.

A latent row (attention/latent.py) is a head of K whose V has the same address: a run of keys is read from memory once
for all query heads, and its values come from the core's cache.

Threads: torch.get_num_threads() at each call, in torch's own OpenMP pool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention.codes import is_quantized, scales_of
from attention.cpu.delta_rule import CpuRule
from attention.cpu.level import best
from attention.cpu.library import DTYPES, POOL_DTYPES, Attend, Pool, Write, library
from attention.interface import RaggedBatch

MAX_HEAD_SIZE = 1024

ONE_ROW = torch.tensor([0, 1], dtype=torch.int32)
"""Offsets of the rows of a batch of one row."""


@dataclass(slots=True)
class Plan:
    """The batch's index tensors in the kernels' form, and the calls of this step. Layers have equal shapes, so only
    addresses change from one layer to the next."""

    cu_q: Tensor  # [S + 1] int32
    ctx_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32, rows contiguous
    slots: Tensor  # [T] int64
    parts: list[tuple[bool, int, int]]  # (are decodes, first request, last request), without empty ones
    angles: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # id(cos) -> cos, both converted
    calls: dict[Hashable, Any] = field(default_factory=dict)  # looks of the arguments -> the struct


class CpuBackend:
    """float32, bfloat16, float16 on x86 with AVX2 or better, or aarch64; head sizes that are multiples of 16."""

    name = "cpu"
    reads_codes = True
    by_address = True
    takes_sinks = True

    def __init__(self, level: str = "auto") -> None:
        """level: a name in attention.cpu.level.LEVELS; auto = the best one. Raises NotCompiled."""
        self.level = best(library, level)
        self.library = library(self.level)
        self._parts: dict[Hashable, tuple[Attend, Tensor]] = {}  # looks of the arguments -> the struct and its length

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
        check_rows(k, kv)
        check_rows(v, kv)
        call = write_call(k, v.stride(), kv, plan)
        call.kv.data, call.k, call.v = kv.data_ptr(), k.data_ptr(), v.data_ptr()
        self.library.mooncake_write(ctypes.addressof(call))

    def rotate_and_write_kv(
        self, qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan
    ) -> Tensor:
        """See AttentionBackend. q is rotated in place: the result is a view of qkv."""
        like = ("rotate", num_heads, *looks(qkv), *looks(kv), torch.get_num_threads())
        call = plan.calls.get(like)
        if call is None:
            call = plan.calls[like] = rotate_call(qkv, num_heads, kv, plan)
        if id(cos) not in plan.angles:
            plan.angles[id(cos)] = cos, cos.float().contiguous(), sin.float().contiguous()
        _, wide_cos, wide_sin = plan.angles[id(cos)]
        at, head = qkv.data_ptr(), qkv.stride(1) * qkv.element_size()
        call.q, call.k, call.v = at, at + num_heads * head, at + (num_heads + kv.shape[2]) * head
        call.cos, call.sin, call.kv.data = wide_cos.data_ptr(), wide_sin.data_ptr(), kv.data_ptr()
        self.library.mooncake_write(ctypes.addressof(call))
        q: Tensor = qkv[:, :num_heads]
        return q

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        like = ("attend", scale, window, soft_cap, *looks(q), *looks(kv), torch.get_num_threads())
        call = plan.calls.get(like)
        if call is None:
            call = plan.calls[like] = attend_call(q, kv, plan, scale, window, soft_cap)
        out = torch.empty(q.shape, dtype=q.dtype)
        call.kv.data, call.q, call.out = kv.data_ptr(), q.data_ptr(), out.data_ptr()
        of_heads = None if sinks is None else checked_sinks(sinks, q)
        call.sinks = None if of_heads is None else of_heads.data_ptr()
        for are_decodes, first, last in plan.parts:
            call.first, call.last = first, last
            kernel = self.library.mooncake_decode if are_decodes else self.library.mooncake_prefill
            kernel(ctypes.addressof(call))
        return out

    def delta_rule(self) -> CpuRule:
        """See attention/delta_states.py. Raises NotCompiled."""
        return CpuRule(self.level)

    def attend_part(
        self, q: Tensor, kv: Tensor, blocks: Tensor, tokens: int, scale: float, soft_cap: float
    ) -> tuple[Tensor, Tensor]:
        """See attention/parts.py."""
        like = (scale, soft_cap, *looks(q), *looks(kv), torch.get_num_threads())
        if like not in self._parts:
            plan = Plan(ONE_ROW, torch.zeros(1, dtype=torch.int32), blocks[None], ONE_ROW.long(), [])
            call = attend_call(q, kv, plan, scale, 0, soft_cap)
            call.first, call.last = 0, 1
            self._parts[like] = call, plan.ctx_lens
        call, length = self._parts[like]
        length[0] = tokens
        out = torch.empty(q.shape, dtype=torch.float32)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        call.kv.data, call.block_tables = kv.data_ptr(), blocks.data_ptr()
        call.q, call.out, call.lse = q.data_ptr(), out.data_ptr(), lse.data_ptr()
        self.library.mooncake_decode(ctypes.addressof(call))
        return out, lse


def looks(x: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """The properties of a tensor in a call's struct, except its address."""
    return x.shape, x.stride(), x.dtype


def write_call(k: Tensor, v_strides: tuple[int, ...], kv: Tensor, plan: Plan) -> Write:
    """The write of rows like k into a pool like kv; addresses of k, v and the pool are missing."""
    call = Write(kv=pool_of(kv), slots=plan.slots.data_ptr())
    call.k_row, call.k_head, call.v_row, call.v_head = *k.stride()[:2], *v_strides[:2]
    call.num_tokens, call.threads, call.dtype = len(k), torch.get_num_threads(), DTYPES[k.dtype]
    return call


def rotate_call(qkv: Tensor, num_heads: int, kv: Tensor, plan: Plan) -> Write:
    """Like write_call, with heads to rotate; cos and sin are missing too."""
    check_rows(qkv[:, num_heads : num_heads + kv.shape[2]], kv)
    call = write_call(qkv, qkv.stride(), kv, plan)
    call.q_row, call.q_head, call.num_heads = *qkv.stride()[:2], num_heads
    return call


def attend_call(q: Tensor, kv: Tensor, plan: Plan, scale: float, window: int, soft_cap: float) -> Attend:
    """Attention of rows like q over a pool like kv; addresses of q, out and the pool, and the requests are missing.

    Raises ValueError for arguments that no kernel takes."""
    check_rows(q, kv)
    if scale <= 0 or window < 0 or soft_cap < 0:
        raise ValueError(f"needs scale > 0, window and soft_cap >= 0, not {scale}, {window}, {soft_cap}")
    call = Attend(kv=pool_of(kv))
    call.block_tables, call.table_row = plan.block_tables.data_ptr(), plan.block_tables.shape[1]
    call.cu_q, call.ctx_lens = plan.cu_q.data_ptr(), plan.ctx_lens.data_ptr()
    call.q_row, call.q_head, call.num_heads = *q.stride()[:2], q.shape[1]
    call.dtype, call.threads = DTYPES[q.dtype], torch.get_num_threads()
    call.scale, call.window, call.soft_cap = scale, window, soft_cap
    return call


def pool_of(kv: Tensor) -> Pool:
    """kv [num_blocks, 2, num_kv_heads, block_size, head_size], strided, the last axis contiguous."""
    if kv.dtype not in POOL_DTYPES or kv.stride(4) != 1:
        kind = f"{kv.dtype} {kv.stride()}"
        raise ValueError(f"the cpu backend needs a float or quantized KV pool with contiguous heads, not {kind}")
    if is_quantized(kv):
        scales_of(kv)  # raises if there is no room for them
    return Pool(kv.data_ptr(), *kv.stride()[:4], *kv.shape[2:], POOL_DTYPES[kv.dtype])


def check_rows(rows: Tensor, kv: Tensor) -> None:
    """rows [T, heads, head_size]: q, k or v for this pool. Raises ValueError for rows that no kernel takes."""
    size, num_kv_heads = kv.shape[4], kv.shape[2]
    if rows.device.type != "cpu" or rows.dtype not in DTYPES:
        raise ValueError(
            f"the cpu backend has no kernel for {rows.dtype} on {rows.device}; choose --attention-backend torch"
        )
    check_head_size(size)
    if rows.shape[2] != size or rows.stride(2) != 1 or rows.shape[1] % num_kv_heads:
        raise ValueError(f"rows {list(rows.shape)}, strides {rows.stride()}, do not fit a pool {list(kv.shape)}")


def checked_sinks(sinks: Tensor, q: Tensor) -> Tensor:
    """[num_heads] float32. Raises ValueError."""
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"{list(sinks.shape)} sinks do not fit {q.shape[1]} heads")
    return sinks.float().contiguous()


def check_head_size(size: int) -> None:
    if size % 16 or not 0 < size <= MAX_HEAD_SIZE:
        raise ValueError(
            f"attention backend 'cpu' has no kernel for head size {size}, which is not a multiple of 16 up to "
            f"{MAX_HEAD_SIZE}; choose --attention-backend torch"
        )
