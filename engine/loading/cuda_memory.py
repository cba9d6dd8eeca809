"""The KV arena in GPU memory as a device of transfers (net/transfer/device/staging.py): copies use a separate stream.

Copies wait for nothing: the submitter has waited for the kernels that write the bytes (engine/step/layer_reports.py,
and the end of a step), so that they overlap with the layers that follow.

Pieces that lie in a grid, as the layers of blocks do, are gathered into one contiguous tensor on the GPU first, so that
thousands of them are one kernel and one copy over the bus.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import gcd

import torch
from torch import Tensor

from engine.model.gpu import Cuda, Event, Gpu, Host
from net.transfer.common.memory import Region

Move = tuple[int, int, int]
"""The same as in net.transfer.device.memory, whose packages a GPU machine without a node may lack."""

Rows = tuple[int, int, list[int]]
"""(bytes per row, offset in host memory of the first, numbers of the rows in the order in which they lie there)"""

MIN_MOVES = 4  # fewer pieces than this are cheaper to copy one by one than to gather
MIN_ROW_BYTES = 256


class CudaCopying:
    """Copies behind an event of the copy stream."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class CudaMemory:
    """A contiguous CUDA tensor, addressed in bytes. See net.transfer.device.memory.Device."""

    def __init__(self, arena: Tensor, gpu: Gpu | None = None) -> None:
        """gpu: whose memory it is, CUDA by default. Raises ValueError on a tensor that lies elsewhere."""
        self._gpu = gpu or Cuda()
        if not self._gpu.holds(arena) or not arena.is_contiguous():
            raise ValueError(f"a device arena is a contiguous CUDA tensor, got one on {arena.device}")
        self._bytes = arena.view(torch.uint8).flatten()
        self.location = self._gpu.place(arena)
        self.nbytes = self._bytes.numel()
        self._stream = self._gpu.stream(arena)

    def pin(self, region: Region) -> None:
        """Raises RuntimeError when the driver refuses."""
        self._gpu.pin(region)

    def unpin(self, region: Region) -> None:
        self._gpu.unpin(region)

    def copy_out(self, host: Region, moves: Sequence[Move]) -> CudaCopying:
        with self._gpu.on(self._stream):
            copy_out(self._bytes, torch.frombuffer(host.memory, dtype=torch.uint8), moves, self._gpu)
            return CudaCopying(self._gpu.mark(self._bytes))

    def copy_in(self, host: Region, moves: Sequence[Move]) -> CudaCopying:
        with self._gpu.on(self._stream):
            copy_in(self._bytes, torch.frombuffer(host.memory, dtype=torch.uint8), moves, self._gpu)
            return CudaCopying(self._gpu.mark(self._bytes))


def gathered(moves: Sequence[Move]) -> tuple[list[Rows], list[Move]]:
    """`moves` as rows of a grid over the device's memory, where their host sides lie side by side, and what is left.

    A buffer may begin and end within a piece (net.transfer.device.memory.chunks) and neighbours may have been joined,
    so the rows are as long as the greatest common divisor of all pieces but the first and the last, and those two may
    be left over."""
    rows: list[Rows] = []
    left: list[Move] = []
    for _, grouped in groupby(_numbered(moves), key=lambda pair: pair[0]):
        run = [move for _, move in grouped]
        unit = gcd(*(number for here, _, length in run[1:-1] for number in (here, length)))
        if len(run) < MIN_MOVES or unit < MIN_ROW_BYTES:
            left += run
            continue
        for end in (-1, 0):
            if run[end][0] % unit or run[end][2] % unit:
                left.append(run.pop(end))
        numbers = [row for here, _, length in run for row in range(here // unit, (here + length) // unit)]
        rows.append((unit, run[0][1], numbers))
    return rows, left


def _numbered(moves: Sequence[Move]) -> list[tuple[int, Move]]:
    """Each with the number of its run: moves whose host sides lie side by side, in order."""
    out: list[tuple[int, Move]] = []
    run, end = 0, None
    for move in moves:
        run += move[1] != end
        end = move[1] + move[2]
        out.append((run, move))
    return out


def copy_out(device: Tensor, host: Tensor, moves: Sequence[Move], gpu: Gpu | None = None) -> None:
    """Both uint8, one-dimensional; asynchronous where `device` is on a GPU and `host` page-locked."""
    gpu = gpu or Host()
    rows, left = gathered(moves)
    for unit, at, numbers in rows:
        together = _grid(device, unit).index_select(0, gpu.index(numbers, device))
        host[at : at + together.numel()].copy_(together.flatten(), non_blocking=True)
    for here, there, length in left:
        host[there : there + length].copy_(device[here : here + length], non_blocking=True)


def copy_in(device: Tensor, host: Tensor, moves: Sequence[Move], gpu: Gpu | None = None) -> None:
    """The other way."""
    gpu = gpu or Host()
    rows, left = gathered(moves)
    for unit, at, numbers in rows:
        together = gpu.move(host[at : at + unit * len(numbers)], device)
        _grid(device, unit).index_copy_(0, gpu.index(numbers, device), together.view(-1, unit))
    for here, there, length in left:
        device[here : here + length].copy_(host[there : there + length], non_blocking=True)


def _grid(device: Tensor, unit: int) -> Tensor:
    """The whole rows of `unit` bytes: [n, unit]."""
    return device[: device.numel() // unit * unit].view(-1, unit)
