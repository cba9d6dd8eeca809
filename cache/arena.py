"""Arena: one large region divided into equal slots, one block each. The pool decides who uses a slot; this computes its
location."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from net.transfer.common.memory import Region

Buffer = bytes | bytearray | memoryview


UNCHECKED = 0
"""Marks a block without a checksum (--no-block-checksums)."""


def checksum(memory: Buffer) -> int:
    """64 bits over a block's bytes, sent and stored with the block. Releases the GIL for large blocks."""
    return xxh3_64_intdigest(memory)


class Arena:
    """Slots 0..num_slots-1 of `slot_bytes` each in `region`. Raises ValueError when not even one fits."""

    def __init__(self, region: Region, slot_bytes: int) -> None:
        if not 0 < slot_bytes <= region.nbytes:
            raise ValueError(f"region {region.name!r} of {region.nbytes} bytes holds no slot of {slot_bytes} bytes")
        self.region = region
        self.slot_bytes = slot_bytes
        self.num_slots = region.nbytes // slot_bytes

    @property
    def name(self) -> str:
        """The region's name in transfers."""
        return self.region.name

    def slot_span(self, slot: int) -> tuple[int, int]:
        """(offset, length) of a slot in the region. Raises IndexError."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        return slot * self.slot_bytes, self.slot_bytes

    def memory(self, slot: int) -> memoryview:
        """Writable bytes of a slot. Raises IndexError."""
        offset, length = self.slot_span(slot)
        return self.region.memory[offset : offset + length]
