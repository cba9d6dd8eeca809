"""Memory of a device that the CPU cannot address: the interface for transfers, and how spans are split for its
buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from net.transfer.common.memory import Region
from net.transfer.common.spans import Span

Move = tuple[int, int, int]
"""(offset on the device, offset in host memory, length)"""


class Copying(Protocol):
    """Several copies, queued in one call."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block, in any thread, until all bytes are copied. Raises the device's exception."""


class Device(Protocol):
    """Memory that the CPU cannot address. Copies run in queue order, parallel to the device's computation."""

    location: str  # "cuda:0@0000:3b:00.0", as net.transfer.common.memory.Region.place
    nbytes: int

    def pin(self, region: Region) -> None:
        """Page-lock host memory: this makes copies fast and asynchronous."""

    def unpin(self, region: Region) -> None: ...

    def copy_out(self, host: Region, moves: Sequence[Move]) -> Copying:
        """Queue copies from the device to host memory. The caller must ensure that the data is computed."""

    def copy_in(self, host: Region, moves: Sequence[Move]) -> Copying:
        """Queue copies from host memory to the device."""


class DeviceRegion:
    """A named arena of device memory; the counterpart of net.transfer.common.memory.Region."""

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self.device = device
        self.nbytes = device.nbytes
        self.closed = False

    def close(self) -> None:
        """The memory stays with the device's owner. Idempotent."""
        self.closed = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """The pieces of one fill of a buffer: (offset on the device, offset in the buffer, remote offset, length)."""

    pieces: Sequence[tuple[int, int, int, int]]
    nbytes: int


def chunks(spans: Sequence[Span], most: int) -> list[Chunk]:
    """Cut and gather (device offset, remote offset, length) into chunks of at most `most` bytes, in order."""
    out: list[Chunk] = []
    pieces: list[tuple[int, int, int, int]] = []
    filled = 0
    for here, there, length in spans:
        done = 0
        while done < length:
            size = min(length - done, most - filled)
            pieces.append((here + done, filled, there + done, size))
            filled += size
            done += size
            if filled == most:
                out.append(Chunk(pieces, filled))
                pieces, filled = [], 0
    return [*out, Chunk(pieces, filled)] if pieces else out
