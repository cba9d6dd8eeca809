"""The Triton backend: split-KV decode for the rows [0, num_decodes); short queries or chunked prefill for the rest.

Runs on NVIDIA GPUs of compute capability 8.0 and later, and, for tests and for study on a laptop, on the CPU under
Triton's interpreter (TRITON_INTERPRET=1 in the environment before this module is imported; thousands of times slower).
No code here waits for the device: the device cuts lengths into work, so a CUDA graph can capture a step and replay it
with other lengths. The graph must capture `plan` with the layers: the first layer's `attend` cuts the work, and a plan
from another step would have that step's lengths.

A model whose layers alternate between a sliding window and none has its work cut once for each.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache

import torch
import triton
from torch import Tensor

from attention.interface import RaggedBatch
from attention.triton.decode import decode, plan_decode
from attention.triton.delta.rule import TritonRule
from attention.triton.geometry import Geometry
from attention.triton.hopper import LongWork, long, long_keys, plan_long
from attention.triton.latent_decode import latent_decode, plan_latent_decode
from attention.triton.latent_prefill import latent_prefill, plan_latent_prefill
from attention.triton.latent_tiles import LatentGeometry, find_latent_tiles
from attention.triton.latent_write import write_latent
from attention.triton.prefill import plan_prefill, prefill
from attention.triton.short import Chunks, ShortWork, is_short, plan_short, short
from attention.triton.tiles import SM90, Tiles, find_tiles
from attention.triton.work import Work
from attention.triton.write import rotate_and_write_kv, write_kv


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a device."""

    shared_bytes: int  # per program
    multiprocessors: int
    hopper: bool  # capability 9: attention/triton/hopper.py runs


@dataclass(slots=True)
class Cut:
    """A step's attention in pieces of work; None if the step has no row of the kind."""

    decode: Work | None
    prefill: Work | None
    short: ShortWork | None = None
    long: LongWork | None = None


@dataclass(slots=True)
class Plan:
    """The step's work by (geometry, window) or latent geometry, cut at the first such layer and used by the later
    ones."""

    batch: RaggedBatch
    cuts: dict[Hashable, Cut] = field(default_factory=dict)


class TritonBackend:
    """float32, bfloat16, float16, and quantized pools; head sizes that are multiples of 16 up to 256; latent rows
    (attention/latent.py) of multiples of 16, up to 512 for the value; any block size and grouping.

    tiles: replaces the row of attention/triton/tiles.py (experiments, tests). limits: replace those of the device
    (kernels compiled without it, tests).
    """

    name = "triton"
    reads_codes = True
    takes_sinks = True

    def __init__(self, *, tiles: Tiles | None = None, limits: Limits | None = None) -> None:
        self._tiles, self._limits = tiles, limits

    def plan(self, batch: RaggedBatch) -> Plan:
        if batch.cu_q.device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise ValueError("the triton backend needs a GPU (or TRITON_INTERPRET=1); use --attention-backend torch")
        return Plan(batch)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan) -> None:
        if len(k):
            write_kv(k, v, kv, batch.slot_mapping)

    def rotate_and_write_kv(
        self, qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan
    ) -> Tensor:
        q: Tensor
        q, k, v = qkv.split((num_heads, kv.shape[2], kv.shape[2]), dim=1)
        if len(q):
            rotate_and_write_kv(q, k, v, cos, sin, kv, batch.slot_mapping)
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
        if window < 0 or soft_cap < 0:
            raise ValueError(f"window {window} and soft_cap {soft_cap} must not be negative; 0 = none")
        if sinks is not None:
            if sinks.shape != q.shape[1:2]:
                raise ValueError(f"{list(sinks.shape)} sinks do not fit {q.shape[1]} heads")
            sinks = sinks.float().contiguous()
        geometry = Geometry.of(q, kv)
        tiles = self.tiles(geometry, q.device)
        cut = plan.cuts.get((geometry, window))
        if cut is None:
            cut = plan.cuts[geometry, window] = self._cut(batch, geometry, tiles, q, kv, window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = batch.num_decodes
        chunks = (batch.block_tables[decodes:], batch.ctx_lens[decodes:], batch.cu_q[decodes:])
        if cut.decode is not None:
            decode(
                q[:decodes],
                kv,
                out[:decodes],
                batch.block_tables[:decodes],
                batch.ctx_lens[:decodes],
                cut.decode,
                scale,
                tiles.decode,
                window=window,
                soft_cap=soft_cap,
                sinks=sinks,
            )
        if cut.long is not None and tiles.long is not None:
            long(q, kv, out, *chunks, cut.long, scale, tiles.long, soft_cap=soft_cap, sinks=sinks)
        if cut.short is not None:
            short(q, kv, out, *chunks, cut.short, scale, tiles.short, window=window, soft_cap=soft_cap, sinks=sinks)
        if cut.prefill is not None:
            prefill(
                q, kv, out, *chunks, cut.prefill, scale, tiles.prefill, window=window, soft_cap=soft_cap, sinks=sinks
            )
        return out

    def write_latent(self, rows: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan) -> None:
        """See attention/latent.py."""
        if len(rows):
            write_latent(rows, kv, batch.slot_mapping)

    def attend_latent(self, q: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan, scale: float, rank: int) -> Tensor:
        """See attention/latent.py."""
        geometry, limits = LatentGeometry.of(q, kv, rank), self._limits or limits_of(q.device)
        tiles = self._tiles or find_latent_tiles(
            geometry.dtype.itemsize, limits.shared_bytes, quantized=geometry.codes > 0
        )
        tables, ctx_lens, decodes = batch.block_tables, batch.ctx_lens, batch.num_decodes
        cut = plan.cuts.get(geometry)
        if cut is None:
            cut = plan.cuts[geometry] = Cut(None, None)
            if decodes:
                programs = 2 * limits.multiprocessors
                cut.decode = plan_latent_decode(ctx_lens[:decodes], geometry, tiles.decode, programs)
            if batch.num_requests > decodes:
                cut.prefill = plan_latent_prefill(batch.cu_q[decodes:], len(q) - decodes, geometry, tiles.prefill)
        out = torch.empty((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
        if cut.decode is not None:
            latent_decode(
                q[:decodes], kv, out[:decodes], tables[:decodes], ctx_lens[:decodes], cut.decode, scale, tiles.decode,
                geometry,
            )  # fmt: skip
        if cut.prefill is not None:
            latent_prefill(
                q, kv, out, tables[decodes:], ctx_lens[decodes:], batch.cu_q[decodes:], cut.prefill, scale,
                tiles.prefill, geometry,
            )  # fmt: skip
        return out

    def delta_rule(self) -> TritonRule:
        """See attention/delta_states.py."""
        return TritonRule()

    def tiles(self, geometry: Geometry, device: torch.device) -> Tiles:
        """The row of the tile table for `geometry` on `device`. Raises ValueError if there is none."""
        if self._tiles is not None:
            return self._tiles
        shared = (self._limits or limits_of(device)).shared_bytes
        return find_tiles(geometry.head_size, geometry.dtype.itemsize, shared, quantized=geometry.codes > 0)

    def _cut(self, batch: RaggedBatch, geometry: Geometry, tiles: Tiles, q: Tensor, kv: Tensor, window: int) -> Cut:
        decodes, limits, cut = batch.num_decodes, self._limits or limits_of(q.device), Cut(None, None)
        programs = 2 * limits.multiprocessors  # two per multiprocessor hide each other's latency
        if decodes:
            cut.decode = plan_decode(batch.ctx_lens[:decodes], geometry, tiles.decode, programs, window)
        if (requests := batch.num_requests - decodes) > 0:
            cu_q, ctx_lens, rows = batch.cu_q[decodes:], batch.ctx_lens[decodes:], q.shape[0] - decodes
            longest = max(batch.q_lens[decodes:])
            keys = long_keys(tiles, geometry, q, kv, window, longest) if limits.hopper else 0
            if keys and tiles.long is not None:
                lens = (batch.q_lens[decodes:], batch.kv_lens[decodes:])
                cut.long = plan_long(cu_q, ctx_lens, *lens, tiles.long, keys, limits.multiprocessors)
                if cut.long.rest.num_rows:
                    cut.short = plan_short(cut.long.rest, cu_q, ctx_lens, geometry, tiles.short, programs, window)
            elif is_short(requests, rows, longest, geometry, tiles.prefill, limits.multiprocessors):
                chunks = Chunks(cu_q, cu_q, rows)
                cut.short = plan_short(chunks, cu_q, ctx_lens, geometry, tiles.short, programs, window)
            else:
                cut.prefill = plan_prefill(cu_q, rows, geometry, tiles.prefill)
        return cut


@cache
def limits_of(device: torch.device) -> Limits:
    """For a GPU, the driver's values. For the interpreter, enough programs for several splits, but few enough to be
    fast."""
    if device.type != "cuda":
        return Limits(shared_bytes=SM90, multiprocessors=4, hopper=True)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return Limits(properties["max_shared_mem"], properties["multiprocessor_count"], hopper)
