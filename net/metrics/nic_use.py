"""How busy the network cards of this machine are, from the kernel's counters. They count the traffic of all processes
and, on RDMA cards, traffic in which no local process takes part.

Cards of unknown speed are skipped, as most cards of virtual machines are. Virtual interfaces are skipped because their
bytes are already counted for a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

SYSTEM = Path("/sys/class")

LISTED_S = 10.0
"""How long a list of the cards and their speeds counts: a list opens a file for each interface, and the event loop
waits for it."""


@dataclass(frozen=True, slots=True)
class Card:
    """One card, or one port of it."""

    name: str
    bytes_per_s: float
    counters: tuple[Path, Path]  # received and sent
    unit_bytes: int  # of the counters

    def moved(self) -> tuple[int, int]:
        """Bytes received and sent. Raises OSError, ValueError."""
        received, sent = (self.unit_bytes * int(counter.read_text()) for counter in self.counters)
        return received, sent


class NicUse:
    """The use of all cards together between two calls of `look`."""

    def __init__(self, system: Path = SYSTEM, listed_s: float = LISTED_S) -> None:
        self._system, self._listed_s = system, listed_s
        self._cards: list[Card] = []
        self._listed_at = -inf
        self._seen: dict[str, tuple[int, int]] = {}  # bytes in and out by card
        self._seen_at: float | None = None

    def look(self, now: float) -> tuple[float, float]:
        """Used fractions of the cards' speed, received and sent, since the last call. Returns 0 for the first call and
        without known cards."""
        if now - self._listed_at >= self._listed_s:
            self._cards, self._listed_at = list(cards(self._system)), now
        seen, speed, moved = {}, 0.0, [0, 0]
        for card in self._cards:
            with suppress(OSError, ValueError):  # it is gone
                received, sent = card.moved()
                seen[card.name] = received, sent
                if card.name in self._seen:
                    before = self._seen[card.name]
                    speed += card.bytes_per_s
                    moved = [moved[0] + max(0, received - before[0]), moved[1] + max(0, sent - before[1])]
        passed = now - self._seen_at if self._seen_at is not None else 0.0
        self._seen, self._seen_at = seen, now
        if speed <= 0 or passed <= 0:
            return 0.0, 0.0
        return min(1.0, moved[0] / passed / speed), min(1.0, moved[1] / passed / speed)


def cards(system: Path) -> Iterator[Card]:
    """Those of known speed."""
    for card in sorted(system.glob("net/*")):
        with suppress(OSError, ValueError):  # a card that is down reports no speed
            mbit_s = int((card / "speed").read_text())
            if (card / "device").exists() and mbit_s > 0:
                counters = card / "statistics/rx_bytes", card / "statistics/tx_bytes"
                yield Card(card.name, mbit_s * 125e3, counters, 1)
    for port in sorted(system.glob("infiniband/*/ports/*")):
        with suppress(OSError, ValueError):
            gbit_s = float((port / "rate").read_text().split()[0])  # "100 Gb/sec (4X EDR)"
            counters = port / "counters/port_rcv_data", port / "counters/port_xmit_data"
            yield Card(f"{port.parts[-3]}/{port.name}", gbit_s * 125e6, counters, 4)
