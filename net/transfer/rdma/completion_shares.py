"""The number of completion queue entries of a device that each queue pair may fill. Pure.

An overflow of a completion queue breaks all its queue pairs. Therefore a queue pair reserves one entry for each request
that it may have in flight, before it is created. A device has as many completion queues as this requires.
"""

from __future__ import annotations


class CompletionShares:
    """Completion queues of `entries` each, by number: 0, 1, ..."""

    def __init__(self, entries: int, most: int) -> None:
        """most: the maximum number of queues of the device."""
        self.entries = entries
        self._most = most
        self._free: list[int] = []  # of each queue

    def take(self, count: int) -> int:
        """Reserves `count` entries and returns the number of their queue; if no queue has this number yet, the caller
        must create it. Raises ValueError if the device cannot have more queues."""
        if count > self.entries:
            raise ValueError(f"{count} requests do not fit into a completion queue of {self.entries} entries")
        number = next((i for i, free in enumerate(self._free) if free >= count), len(self._free))
        if number == len(self._free):
            if number >= self._most:
                raise ValueError(f"all {self._most} completion queues are in use: too many peers")
            self._free.append(self.entries)
        self._free[number] -= count
        return number

    def give_back(self, number: int, count: int) -> None:
        """Free the entries of a queue pair that is destroyed and whose completions have been polled."""
        self._free[number] += count
