"""The KV arena in GPU memory as a device of transfers (net/staging.py): copies on a stream of their own.

Pieces of equal length that start at multiples of it, as the layers of blocks do, are gathered into one contiguous
tensor on the GPU first, so that thousands of them are one kernel and one copy over the bus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from net.memory import Region

Move = tuple[int, int, int]
"""As in net.device_memory, which needs more packages than a GPU machine without a node has."""

MIN_ROWS = 4  # below so many pieces a copy each is cheaper than gathering


class CudaCopying:
    """Copies behind an event of the copy stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaMemory:
    """A contiguous CUDA tensor, addressed in bytes. See net.device_memory.Device."""

    def __init__(self, arena: Tensor, after: torch.cuda.Stream | None = None) -> None:
        """after: copies out wait for what this stream has been given so far; None: whoever submits has waited for the
        kernels that write the bytes (an event per layer), so that copies overlap with later layers."""
        if not arena.is_cuda or not arena.is_contiguous():
            raise ValueError(f"a device arena is a contiguous CUDA tensor, got one on {arena.device}")
        self._bytes = arena.view(torch.uint8).flatten()
        card: Any = torch.cuda.get_device_properties(arena.device)  # the stubs leave the PCI address out
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        self.location = f"cuda:{arena.get_device()}@{address}"
        self.nbytes = self._bytes.numel()
        self._after = after
        self._stream = torch.cuda.Stream(arena.device)

    def pin(self, region: Region) -> None:
        """Raises RuntimeError when the driver refuses."""
        _check(torch.cuda.cudart().cudaHostRegister(region.address, region.nbytes, 0), "cudaHostRegister")

    def unpin(self, region: Region) -> None:
        _check(torch.cuda.cudart().cudaHostUnregister(region.address), "cudaHostUnregister")

    def copy_out(self, host: Region, moves: Sequence[Move]) -> CudaCopying:
        if self._after is not None:
            self._stream.wait_stream(self._after)
        with torch.cuda.stream(self._stream):
            copy_out(self._bytes, torch.frombuffer(host.memory, dtype=torch.uint8), moves)
            return CudaCopying(self._stream.record_event())

    def copy_in(self, host: Region, moves: Sequence[Move]) -> CudaCopying:
        with torch.cuda.stream(self._stream):
            copy_in(self._bytes, torch.frombuffer(host.memory, dtype=torch.uint8), moves)
            return CudaCopying(self._stream.record_event())


def _check(error: int, call: str) -> None:
    if int(error) != 0:
        raise RuntimeError(f"{call} failed with CUDA error {int(error)}")


def rows_of(moves: Sequence[Move], nbytes: int) -> tuple[int, list[int]] | None:
    """(bytes per row, row numbers) when the device sides are rows of a matrix over its `nbytes`, and the host sides
    one contiguous stretch in the same order; else None."""
    length = moves[0][2]
    if len(moves) < MIN_ROWS or nbytes % length:
        return None
    first = moves[0][1]
    for i, (here, there, size) in enumerate(moves):
        if size != length or here % length or there != first + i * length:
            return None
    return length, [here // length for here, _, _ in moves]


def copy_out(device: Tensor, host: Tensor, moves: Sequence[Move]) -> None:
    """Both uint8, one-dimensional; asynchronous where `device` is on a GPU and `host` page-locked."""
    if (found := rows_of(moves, device.numel())) is not None:
        length, rows = found
        index = torch.tensor(rows).to(device.device, non_blocking=True)
        gathered = device.view(-1, length).index_select(0, index)
        host[moves[0][1] : moves[0][1] + gathered.numel()].copy_(gathered.flatten(), non_blocking=True)
        return
    for here, there, length in moves:
        host[there : there + length].copy_(device[here : here + length], non_blocking=True)


def copy_in(device: Tensor, host: Tensor, moves: Sequence[Move]) -> None:
    """The other way."""
    if (found := rows_of(moves, device.numel())) is not None:
        length, rows = found
        index = torch.tensor(rows).to(device.device, non_blocking=True)
        block = host[moves[0][1] : moves[0][1] + length * len(rows)].to(device.device, non_blocking=True)
        device.view(-1, length).index_copy_(0, index, block.view(-1, length))
        return
    for here, there, length in moves:
        device[here : here + length].copy_(host[there : there + length], non_blocking=True)
