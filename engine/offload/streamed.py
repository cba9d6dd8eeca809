"""StreamedLayers: a model of which some layers are in memory, and the others are read from disk in every pass.

A *unit* is what the operations behind the attention of one layer read: o, gate, up and down of that layer, and q, k and
v of the next one. So a unit is needed for one call, and a layer waits once. While the model is made, each unit is
packed for the kernels of this CPU and written to a file (spool.py); no more than two layers are in memory at once. When
all are there, reading and computing are measured, the plan (sched/offload.py) says which units stay, and these are read
back. In a pass the others come through the ring (ring.py), whose buffers the kernels read where they are.

Only dense layers with plain attention: everything else in a layer stays where it was made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config.flags import UsageError
from engine.model.layers import Layer, Mlp
from engine.model.ops.cpu import CpuGatedLinear, CpuLinear, CpuOps, CpuTail, Packed
from engine.model.ops.huge_pages import HugePages
from engine.model.ops.interface import Linear, Tail
from engine.offload.ring import Ring
from engine.offload.spool import Extent, Spool
from sched.offload import Plan, Sizes, Speed, choose, described, no_room

log = logging.getLogger("mooncake.engine")

MEASURED_S = 1.0
"""Time for reading before the plan."""

MEASURED_ROWS = (1, 64)
TIMES = 3
"""Products are timed this often; the shortest time counts."""


@dataclass(frozen=True, slots=True)
class Unit:
    """`parts`: its weights, and `extent`: where they are in the file."""

    parts: Sequence[CpuLinear | CpuGatedLinear]
    extent: Extent

    def move(self, memory: Tensor) -> None:
        """To `memory` [extent.nbytes] uint8, which has the extent."""
        for part, offset in zip(self.parts, self.extent.offsets, strict=True):
            part.move(memory[offset : offset + part.nbytes])


class StreamedLayers:
    """An engine.model.decoder.Offload. One model is made with it."""

    def __init__(self, ops: CpuOps, folder: Path, fixed_bytes: int, memory_bytes: int, rows: int) -> None:
        """`fixed_bytes`: of the weights outside units; `memory_bytes`: --weight-memory-bytes; `rows`: of a full decode
        step. Raises UsageError."""
        self._ops, self._fixed_bytes, self._memory_bytes, self._rows = ops, fixed_bytes, memory_bytes, rows
        try:
            self._spool = Spool(folder)
        except OSError as error:
            raise UsageError(f"--offload-path {folder}: {error.strerror or error}; give a folder on a disk") from error
        self._units: list[Unit] = []
        self._ring: Ring[Tensor] | None = None
        self._plan: Plan | None = None
        self._passes = 0

    @property
    def plan(self) -> Plan:
        assert self._plan is not None, "the layers are made first"
        return self._plan

    # --- while the model is made

    def layers(self, make: Callable[[int], Layer], count: int) -> list[Layer]:
        """See Offload. Raises UsageError if the file or the ring finds no room."""
        lasting, layers = self._ops.memory, list[Layer]()
        try:
            for index in range(count):
                self._ops.memory = HugePages()  # goes when the weights in it have left
                layers.append(make(index))
                if index:
                    self._store(_behind(layers[index - 1]), layers[index].qkv)
                else:
                    _copy(_packed(layers[0].qkv), lasting)
            self._store(_behind(layers[-1]), None)
            self._spool.settle()
        except OSError as error:
            raise UsageError(
                f"--offload-path: cannot write {self._spool.nbytes} bytes of layers there and more: "
                f"{error.strerror or error}; give a folder with room"
            ) from error
        finally:
            self._ops.memory = lasting
        first = _packed(layers[0].qkv).nbytes
        sizes = Sizes(self._fixed_bytes + first, tuple(unit.extent.nbytes for unit in self._units))
        self._settle(sizes, lasting)
        return layers

    def _store(self, weights: Sequence[Linear], following: Linear | None) -> None:
        """The next unit leaves memory."""
        parts = [_packed(weight) for weight in (*weights, *([] if following is None else [following]))]
        extent = self._spool.append([part.bytes.numpy().data for part in parts])
        for part in parts:
            part.move(None)
        self._units.append(Unit(parts, extent))

    def _settle(self, sizes: Sizes, lasting: HugePages) -> None:
        if (reason := no_room(sizes, self._memory_bytes)) is not None:
            raise UsageError(reason)
        buffer = HugePages().take(max(sizes.layers), dtype=torch.uint8)
        plan = choose(sizes, self._memory_bytes, self._measure(buffer), self._rows)
        assert plan is not None, "there is room for the least ring"
        self._plan = plan
        for unit in self._units:
            for part in unit.parts:
                part.move(None)
        kept = [unit for layer, unit in enumerate(self._units) if layer not in plan.streamed]
        place, memory = 0, HugePages().take(sum(unit.extent.nbytes for unit in kept), dtype=torch.uint8)
        for unit in kept:
            there = memory[place : place + unit.extent.nbytes]
            self._spool.read(unit.extent, there.numpy().data)
            unit.move(there)
            place += unit.extent.nbytes
        log.info("%s", described(plan, self._memory_bytes, self._rows))
        if not self._spool.direct:
            log.warning("--offload-path has no direct access: reads pass the page cache, which is emptied after each")
        if plan.streamed:
            whole = HugePages().take(plan.ring * plan.buffer_bytes, dtype=torch.uint8)
            buffers = whole.split(plan.buffer_bytes)
            self._ring = Ring(self._fill, plan.streamed, buffers, plan.buffer_bytes, plan.speed.read_bytes_s)

    def _measure(self, buffer: Tensor) -> Speed:
        """Reads units, and multiplies with the first one."""
        begun, nbytes = time.perf_counter(), 0
        for unit in reversed(self._units):  # so that the first one is there at the end
            self._spool.read(unit.extent, buffer.numpy().data)
            nbytes += unit.extent.nbytes
            if time.perf_counter() - begun > MEASURED_S:
                break
        rate = nbytes / (time.perf_counter() - begun)
        first = self._units[0]
        self._spool.read(first.extent, buffer.numpy().data)
        first.move(buffer)
        few, many = (min(self._seconds(first, rows) for _ in range(TIMES + 1)) for rows in MEASURED_ROWS)
        row_s = max(0.0, (many - few) / (MEASURED_ROWS[1] - MEASURED_ROWS[0]))
        return Speed(rate, max(0.0, few - row_s * MEASURED_ROWS[0]), row_s)

    def _seconds(self, unit: Unit, rows: int) -> float:
        """Of its products with some rows."""
        inputs = [torch.ones(rows, part.k, dtype=part.dtype) for part in unit.parts]
        begun = time.perf_counter()
        for part, x in zip(unit.parts, inputs, strict=True):
            part(x)
        return time.perf_counter() - begun

    # --- passes

    def tail(self, index: int, tail: Tail) -> Tail:
        """See Offload."""
        unit, ring = self._units[index], self._ring
        if ring is None or index not in self.plan.streamed:
            return tail
        last = index == self.plan.streamed[-1]

        def run(attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            with ring.use(index) as memory:
                unit.move(memory)
                if isinstance(tail, CpuTail):
                    tail.renew()
                found = tail(attended, x)
            self._passes += last
            return found

        return run

    def _fill(self, index: int, memory: Tensor) -> int:
        extent = self._units[index].extent
        self._spool.read(extent, memory.numpy().data)
        return extent.nbytes

    def least_s(self) -> float:
        """See Offload."""
        return 0.0 if self._ring is None else self.plan.pass_bytes / self._ring.rate

    def state(self) -> dict[str, Any]:
        """See Offload."""
        plan, ring = self.plan, self._ring
        return {
            "layers": len(plan.sizes.layers),
            "streamed_layers": len(plan.streamed),
            "ring": plan.ring,
            "weight_bytes": plan.sizes.total,
            "memory_bytes": plan.memory_bytes,
            "pass_bytes": plan.pass_bytes,
            "read_s": plan.read_s,
            "fill_rows": plan.fill_rows,
            "forecast_s": {rows: plan.pass_s(rows) for rows in (1, self._rows)},
            "speed": asdict(plan.speed),
            "direct": self._spool.direct,
            "passes": self._passes,
            "bytes_read": 0 if ring is None else ring.nbytes,
            "read_bytes_per_s": 0.0 if ring is None else ring.rate,
            "waited_s": 0.0 if ring is None else ring.waited_s,
        }

    def close(self) -> None:
        """See Offload."""
        if self._ring is not None:
            self._ring.close()
        self._spool.close()


def _packed(weight: Linear) -> CpuLinear | CpuGatedLinear:
    """In the kernels' order, as CpuOps makes it of each matrix of the model's type."""
    assert isinstance(weight, CpuLinear | CpuGatedLinear)
    return weight


def _behind(layer: Layer) -> list[Linear]:
    """The products behind attention."""
    assert isinstance(layer.mlp, Mlp)
    return [layer.o, layer.mlp.gate_up, layer.mlp.down]


def _copy(weight: Packed, lasting: HugePages) -> None:
    """It moves to memory that stays."""
    memory = lasting.take(weight.nbytes, dtype=torch.uint8)
    memory.copy_(weight.bytes)
    weight.move(memory)
