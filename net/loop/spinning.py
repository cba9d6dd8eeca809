"""Spinning: whether a thread without an event loop looks again and again for bytes, or sleeps until they arrive. Pure.

The reasons and the rule are those of net/loop/polling.py: a core that sleeps needs an interrupt to wake. If the bytes
do not arrive while the thread looks, or are found later because it had no core, the next 2 waits sleep, after the next
failure 4, up to SKIP_MAX.
"""

from __future__ import annotations

SKIP_MAX = 64


class Spinning:
    """The waits of one connection."""

    def __init__(self) -> None:
        self._skip = 0  # waits that sleep
        self._next_skip = 2

    def begin(self) -> bool:
        """A wait begins: whether to look for bytes first."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def ended(self, in_time: bool) -> None:
        """Looking has ended: whether bytes were found in time."""
        if in_time:
            self._next_skip = 2
        else:
            self._skip = self._next_skip
            self._next_skip = min(SKIP_MAX, 2 * self._next_skip)
