"""Predicts how long blocks on SSD take to reach DRAM, fitted to this node's reads and including queued ones. Pure.

A read that is queued when x bytes are queued, including its own, ends after about latency + x / rate. Each read
measures exactly this, so one line describes the queue, the reading threads and the disk.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class ReadModel(Protocol):
    """seconds = latency + bytes / rate, fitted online (sched/cost.py TransferModel)."""

    def observe(self, nbytes: int, seconds: float) -> None:
        """A measurement; seconds > 0."""

    def estimate(self, nbytes: int) -> float:
        """Predicted seconds of a read of `nbytes`."""


class SsdPrice(NamedTuple):
    """The present cost of reading blocks from a node's SSD, seconds: `fixed_s` once, and `block_s` for each."""

    fixed_s: float
    block_s: float

    def seconds(self, blocks: int) -> float:
        return self.fixed_s + blocks * self.block_s if blocks else 0.0


FREE = SsdPrice(0.0, 0.0)


class SsdReads:
    """The reads of one tier with slots of `slot_bytes`. Without a model, reads count as free."""

    def __init__(self, slot_bytes: int, model: ReadModel | None) -> None:
        self._slot_bytes = slot_bytes
        self._model = model
        self.queued_bytes = 0

    def asked(self) -> int:
        """Queue the read of a block; returns the bytes that are queued now. `over` must follow."""
        self.queued_bytes += self._slot_bytes
        return self.queued_bytes

    def over(self, queued_bytes: int, seconds: float, *, good: bool) -> None:
        """End a read that took `seconds` since `asked` returned `queued_bytes`. A failed read is not a measurement."""
        self.queued_bytes -= self._slot_bytes
        if good and self._model is not None and seconds > 0:
            self._model.observe(queued_bytes, seconds)

    def price(self) -> SsdPrice:
        """The price for a new reader, after the queued reads."""
        if self._model is None:
            return FREE
        one = self._model.estimate(self.queued_bytes + self._slot_bytes)
        block_s = self._model.estimate(self.queued_bytes + 2 * self._slot_bytes) - one
        return SsdPrice(one - block_s, block_s)
