"""The operations of a device beyond those on tensors: streams, events, page-locked memory, uploads.

All of it goes through this narrow place. `Cuda` is the real one; `Host` is for tensors in host memory, where everything
has happened when a call returns; tests/late_gpu.py runs everything as late as CUDA may.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from net.transfer.common.memory import Region

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of this process


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream is past it."""

    def synchronize(self) -> None:
        """Sleep, in any thread, until it is. Raises what the device raised."""


class Stream(Protocol):
    """Work in the order it was queued."""

    def wait_stream(self, other: Any) -> None:
        """What is queued from now on runs behind what the other stream has been given so far."""


class Gpu(Protocol):
    """`like`: any tensor on the device that is meant. Copies into and out of page-locked memory that are
    `non_blocking` are queued on the device's current stream, like everything else that is done with its tensors."""

    asynchronous: bool
    """Work is done after the call that queues it."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies on such a device."""

    def place(self, like: Tensor) -> str:
        """As net.transfer.common.memory.Region.place."""

    def stream(self, like: Tensor) -> Stream:
        """A new one of that device."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The stream is the current one of its device, and that is the current device, inside."""

    def mark(self, like: Tensor) -> Event:
        """The end of what the device's current stream has been given so far."""

    def settle(self, like: Tensor) -> None:
        """Wait for everything that the device has been given."""

    def buffer(self, count: int, like: Tensor) -> Tensor:
        """[count] int64 of host memory, page-locked, to be moved to the device."""

    def index(self, rows: Sequence[int], like: Tensor) -> Tensor:
        """The row numbers [n] int64 on the device. The caller does not wait: from memory that is not page-locked an
        upload would wait for the whole stream."""

    def move(self, tensor: Tensor, like: Tensor) -> Tensor:
        """A copy on the device, queued; the tensor itself if it lies there. A page-locked one may be dropped but not
        changed before the copy has run."""

    def pin(self, region: Region) -> None:
        """Page-lock host memory. Raises RuntimeError when the driver refuses."""

    def unpin(self, region: Region) -> None: ...


class Cuda:
    asynchronous = True

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def place(self, like: Tensor) -> str:
        card: Any = torch.cuda.get_device_properties(like.device)  # the stubs leave the PCI address out
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        return f"cuda:{like.get_device()}@{address}"

    def stream(self, like: Tensor) -> Stream:
        return torch.cuda.Stream(like.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def mark(self, like: Tensor) -> Event:
        event = torch.cuda.Event(blocking=True)  # others spin while they wait, on a core that steps need
        event.record(torch.cuda.current_stream(like.device))
        return event

    def settle(self, like: Tensor) -> None:
        torch.cuda.synchronize(like.device)

    def buffer(self, count: int, like: Tensor) -> Tensor:
        return torch.empty(count, dtype=torch.int64, pin_memory=True)

    def index(self, rows: Sequence[int], like: Tensor) -> Tensor:
        # torch keeps page-locked memory that was dropped from others until the copy out of it has run
        return self.move(torch.tensor(rows, dtype=torch.int64, pin_memory=True), like)

    def move(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device, non_blocking=True)

    def pin(self, region: Region) -> None:
        _check(torch.cuda.cudart().cudaHostRegister(region.address, region.nbytes, PORTABLE), "cudaHostRegister")

    def unpin(self, region: Region) -> None:
        _check(torch.cuda.cudart().cudaHostUnregister(region.address), "cudaHostUnregister")


class Past:
    """An event of memory where everything has happened already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Lane:
    """A stream of it."""

    def wait_stream(self, other: Any) -> None:
        pass


class Host:
    asynchronous = False

    def holds(self, tensor: Tensor) -> bool:
        return not tensor.is_cuda

    def place(self, like: Tensor) -> str:
        return "host"

    def stream(self, like: Tensor) -> Stream:
        return Lane()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self, like: Tensor) -> Event:
        return Past()

    def settle(self, like: Tensor) -> None:
        pass

    def buffer(self, count: int, like: Tensor) -> Tensor:
        return torch.empty(count, dtype=torch.int64)

    def index(self, rows: Sequence[int], like: Tensor) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64)

    def move(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device)  # nothing but for "meta", whose tensors have no memory

    def pin(self, region: Region) -> None:
        pass

    def unpin(self, region: Region) -> None:
        pass


def gpu_of(device: torch.device) -> Gpu:
    """What holds the tensors of that device."""
    return Cuda() if device.type == "cuda" else Host()


def _check(error: int, call: str) -> None:
    if int(error) != 0:
        raise RuntimeError(f"{call} failed with CUDA error {int(error)}")
