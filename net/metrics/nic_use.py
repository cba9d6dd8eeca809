"""How busy the network cards of this machine are, from the kernel's counters. They count the traffic of all processes
and, on RDMA cards, traffic in which no local process takes part.

Cards of unknown speed are skipped, as most cards of virtual machines are. Virtual interfaces are skipped because their
bytes are already counted for a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys/class")


class NicUse:
    """The use of all cards together between two calls of `look`."""

    def __init__(self, system: Path = SYSTEM) -> None:
        self._system = system
        self._seen: dict[str, tuple[int, int]] = {}  # bytes in and out by card
        self._seen_at: float | None = None

    def look(self, now: float) -> tuple[float, float]:
        """Used fractions of the cards' speed, received and sent, since the last call. Returns 0 for the first call and
        without known cards."""
        seen, speed, moved = {}, 0.0, [0, 0]
        for name, bytes_per_s, received, sent in self._cards():
            seen[name] = received, sent
            if name in self._seen:
                before = self._seen[name]
                speed += bytes_per_s
                moved = [moved[0] + max(0, received - before[0]), moved[1] + max(0, sent - before[1])]
        passed = now - self._seen_at if self._seen_at is not None else 0.0
        self._seen, self._seen_at = seen, now
        if speed <= 0 or passed <= 0:
            return 0.0, 0.0
        return min(1.0, moved[0] / passed / speed), min(1.0, moved[1] / passed / speed)

    def _cards(self) -> Iterator[tuple[str, float, int, int]]:
        """(name, bytes/s, bytes in, bytes out)"""
        for card in sorted(self._system.glob("net/*")):
            with suppress(OSError, ValueError):  # a card that is down reports no speed
                mbit_s = int((card / "speed").read_text())
                if (card / "device").exists() and mbit_s > 0:
                    received, sent = (int((card / f"statistics/{way}_bytes").read_text()) for way in ("rx", "tx"))
                    yield card.name, mbit_s * 125e3, received, sent
        for port in sorted(self._system.glob("infiniband/*/ports/*")):
            with suppress(OSError, ValueError):
                gbit_s = float((port / "rate").read_text().split()[0])  # "100 Gb/sec (4X EDR)"
                received, sent = (int((port / f"counters/port_{way}_data").read_text()) for way in ("rcv", "xmit"))
                yield f"{port.parts[-3]}/{port.name}", gbit_s * 125e6, 4 * received, 4 * sent  # words of 4 bytes
