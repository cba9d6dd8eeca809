"""The number of completion queue entries of a device that each queue pair may fill. Pure.

A completion queue that overflows takes all its queue pairs with it. So a queue pair takes as many entries as it can
have requests under way, before it is made, and a device has as many completion queues as that needs.
"""

from __future__ import annotations


class CompletionShares:
    """Completion queues of `entries` each, by number: 0, 1, ..."""

    def __init__(self, entries: int, most: int) -> None:
        """most: queues that the device can have."""
        self.entries = entries
        self._most = most
        self._free: list[int] = []  # of each queue

    def take(self, count: int) -> int:
        """The number of a queue with `count` free entries, which are taken; one more than there were so far is a queue
        to be made. Raises ValueError when the device cannot have so many."""
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
        """The queue pair is gone and its completions have been taken."""
        self._free[number] += count
