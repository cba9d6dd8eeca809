"""The operations of a device beyond those on tensors: streams, events, page-locked memory, uploads.

All code uses these interfaces. `Cuda` is the real device; `Host` is for tensors in host memory, where all work is done
when a call returns; tests/late_gpu.py runs all work as late as CUDA may.
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
        """Sleep, in any thread, until the stream is past it. Raises the device's exception."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_stream(self, other: Any) -> None:
        """Work queued from now on runs after all work that the other stream contains now."""


class Gpu(Protocol):
    """`like`: any tensor on the intended device. `non_blocking` copies from and to page-locked memory are queued on the
    device's current stream, like all other work on its tensors."""

    asynchronous: bool
    """Work runs after the call that queues it has returned."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is on such a device."""

    def place(self, like: Tensor) -> str:
        """The device's place, in the form of net.transfer.common.memory.Region.place."""

    def stream(self, like: Tensor) -> Stream:
        """A new stream of the device."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which the stream is its device's current stream, and the device is the current one."""

    def mark(self, like: Tensor) -> Event:
        """The end of all work that the device's current stream contains now."""

    def settle(self, like: Tensor) -> None:
        """Wait for all work of the device."""

    def buffer(self, count: int, like: Tensor) -> Tensor:
        """[count] int64 of page-locked host memory for uploads to the device."""

    def index(self, rows: Sequence[int], like: Tensor) -> Tensor:
        """The row numbers [n] int64 on the device. The caller does not wait, because the upload is from page-locked
        memory; otherwise it would wait for the whole stream."""

    def move(self, tensor: Tensor, like: Tensor) -> Tensor:
        """A queued copy on the device, or the tensor itself if it is there. The caller may drop a page-locked tensor
        before the copy has run, but not change it."""

    def pin(self, region: Region) -> None:
        """Page-lock host memory. Raises RuntimeError if the driver refuses."""

    def unpin(self, region: Region) -> None: ...


class Cuda:
    asynchronous = True

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def place(self, like: Tensor) -> str:
        card: Any = torch.cuda.get_device_properties(like.device)  # the type stubs lack the PCI address
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        return f"cuda:{like.get_device()}@{address}"

    def stream(self, like: Tensor) -> Stream:
        return torch.cuda.Stream(like.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def mark(self, like: Tensor) -> Event:
        event = torch.cuda.Event(blocking=True)  # other events spin while they wait, on a core that steps need
        event.record(torch.cuda.current_stream(like.device))
        return event

    def settle(self, like: Tensor) -> None:
        torch.cuda.synchronize(like.device)

    def buffer(self, count: int, like: Tensor) -> Tensor:
        return torch.empty(count, dtype=torch.int64, pin_memory=True)

    def index(self, rows: Sequence[int], like: Tensor) -> Tensor:
        # torch does not reuse dropped page-locked memory before the copy from it has run
        return self.move(torch.tensor(rows, dtype=torch.int64, pin_memory=True), like)

    def move(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.device, non_blocking=True)

    def pin(self, region: Region) -> None:
        _check(torch.cuda.cudart().cudaHostRegister(region.address, region.nbytes, PORTABLE), "cudaHostRegister")

    def unpin(self, region: Region) -> None:
        _check(torch.cuda.cudart().cudaHostUnregister(region.address), "cudaHostUnregister")


class Past:
    """An event on the host, where all work is already done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Lane:
    """A stream on the host."""

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
        return tensor.to(like.device)  # has an effect only for "meta", whose tensors have no memory

    def pin(self, region: Region) -> None:
        pass

    def unpin(self, region: Region) -> None:
        pass


def gpu_of(device: torch.device) -> Gpu:
    """The Gpu for tensors of that device."""
    return Cuda() if device.type == "cuda" else Host()


def _check(error: int, call: str) -> None:
    if int(error) != 0:
        raise RuntimeError(f"{call} failed with CUDA error {int(error)}")
