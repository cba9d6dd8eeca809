"""The Triton backend: split-KV decode for the rows [0, num_decodes), chunked prefill for the rest.

Runs on NVIDIA GPUs of compute capability 8.0 and later, and, for tests and for reading along on a laptop, on the CPU
under Triton's interpreter (TRITON_INTERPRET=1 in the environment before this module is imported; thousands of times
slower). Nothing here waits for the device: lengths are cut into work on the device, so a step can be captured in a
CUDA graph and replayed with other lengths, as long as `plan` is captured with the layers: the first layer's `attend`
cuts the work, and a plan kept from another step would have the lengths of that step.

Sliding window and soft cap belong to the model's layers: a model that alternates them has one backend for each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from attention.decode import decode, plan_decode
from attention.interface import RaggedBatch
from attention.prefill import plan_prefill, prefill
from attention.tiles import SM90, Geometry, Tiles, find_tiles
from attention.work import Work
from attention.write import rotate_and_write_kv, write_kv


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device has."""

    shared_bytes: int  # per program
    multiprocessors: int


@dataclass(slots=True)
class Plan:
    """The step's work, cut when the first layer tells the geometry; every later layer finds it done."""

    batch: RaggedBatch
    geometry: Geometry | None = None
    decode: Work | None = None
    prefill: Work | None = None


class TritonBackend:
    """float32, bfloat16, float16; head sizes that are multiples of 16 up to 256; any block size and grouping.

    window: keys that a row sees, itself included; 0 = all.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); 0.0 = none.
    tiles: replaces the row of attention/tiles.py (experiments, tests).
    """

    name = "triton"

    def __init__(self, *, window: int = 0, soft_cap: float = 0.0, tiles: Tiles | None = None) -> None:
        if window < 0 or soft_cap < 0:
            raise ValueError(f"window {window} and soft_cap {soft_cap} must not be negative; 0 = none")
        self.window = window
        self.soft_cap = soft_cap
        self._tiles = tiles

    def plan(self, batch: RaggedBatch) -> Plan:
        if batch.cu_q.device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise ValueError("the triton backend needs a GPU (or TRITON_INTERPRET=1); use --attention-backend torch")
        return Plan(batch)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan) -> None:
        if len(k):
            write_kv(k, v, kv, batch.slot_mapping)

    def rotate_and_write_kv(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: RaggedBatch
    ) -> None:
        """Rotary embedding of q (in place) and k, and write_kv, in one launch; see attention/write.py."""
        if len(q):
            rotate_and_write_kv(q, k, v, cos, sin, batch.positions, kv, batch.slot_mapping)

    def attend(self, q: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan, scale: float) -> Tensor:
        geometry = Geometry.of(q, kv)
        tiles = self.tiles(geometry, q.device)
        if plan.geometry != geometry:
            self._cut(plan, geometry, tiles, q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = batch.num_decodes
        if plan.decode is not None:
            decode(
                q[:decodes],
                kv,
                out[:decodes],
                batch.block_tables[:decodes],
                batch.ctx_lens[:decodes],
                plan.decode,
                scale,
                tiles.decode,
                window=self.window,
                soft_cap=self.soft_cap,
            )
        if plan.prefill is not None:
            prefill(
                q,
                kv,
                out,
                batch.block_tables[decodes:],
                batch.ctx_lens[decodes:],
                batch.cu_q[decodes:],
                plan.prefill,
                scale,
                tiles.prefill,
                window=self.window,
                soft_cap=self.soft_cap,
            )
        return out

    def tiles(self, geometry: Geometry, device: torch.device) -> Tiles:
        """The row of the tile table for `geometry` on `device`. Raises ValueError if there is none."""
        if self._tiles is not None:
            return self._tiles
        return find_tiles(geometry.head_size, geometry.dtype.itemsize, limits_of(device).shared_bytes)

    def _cut(self, plan: Plan, geometry: Geometry, tiles: Tiles, q: Tensor) -> None:
        batch, decodes = plan.batch, plan.batch.num_decodes
        plan.geometry = geometry
        if decodes:
            lens = batch.ctx_lens[:decodes]
            # Two programs on every multiprocessor hide each other's latency.
            programs = 2 * limits_of(q.device).multiprocessors
            plan.decode = plan_decode(lens, geometry, tiles.decode, programs, self.window)
        if batch.num_requests > decodes:
            plan.prefill = plan_prefill(batch.cu_q[decodes:], q.shape[0] - decodes, geometry, tiles.prefill)


@cache
def limits_of(device: torch.device) -> Limits:
    """Of a GPU: what the driver says. The interpreter: enough programs for several splits, few enough to be quick."""
    if device.type != "cuda":
        return Limits(shared_bytes=SM90, multiprocessors=4)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Limits(properties["max_shared_mem"], properties["multiprocessor_count"])
