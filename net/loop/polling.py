"""Busy polling: keeps the event loop awake if the next bytes are likely to arrive within microseconds.

An interrupt to its core wakes a loop that sleeps in epoll. Under a hypervisor, this costs tens of microseconds on both
sides: the sender pays in the middle of its send, once for each piece that finds the receiver asleep. While a payload
arrives or an answer is due, the next bytes arrive sooner than that.

There are two kinds of waits: for the rest of a payload (REST) and for the next message (NEXT). Polling fails if nothing
arrives within `most_s` seconds: the peer is slow or seldom asks, or it needs the core on which this loop polls. It also
fails if the bytes are found later than that: then this process did not have its core, and polling used up time that it
needs when the bytes arrive. The next 2 waits of that kind then sleep, after the next failure 4, up to SKIP_MAX. Bytes
that arrive while the loop polls reset this count. If packets arrive within `most_s` of each other, a core stays awake
for the whole transfer.
"""

from __future__ import annotations

import asyncio
import time

REST, NEXT = range(2)
SKIP_MAX = 64


class Polling:
    """The polling of one connection; call it when a wait begins and when bytes have arrived."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._loop = asyncio.get_running_loop()
        self._kind = NEXT
        self._waiting = False
        self._since = 0.0  # when the wait began; 0 until `_turn` has seen it
        self._awake = False  # `_turn` is scheduled
        self._skip = [0, 0]  # waits of each kind that sleep
        self._next_skip = [2, 2]

    def begin(self, kind: int) -> None:
        """All received bytes are handled, and more are expected."""
        self._kind = kind
        self._waiting = not self._skip[kind]
        if not self._waiting:
            self._skip[kind] -= 1
            return
        self._since = 0.0
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._turn)

    def go_on(self) -> None:
        """Bytes have arrived, and the rest of that payload is expected."""
        if self._waiting and self._kind == REST:
            if self._since:
                self._since = 0.0
                self._next_skip[REST] = 2
        else:
            self.end()
            self.begin(REST)

    def end(self) -> None:
        """Bytes have arrived."""
        if self._waiting:
            self._waiting = False
            if self._since and time.monotonic() - self._since <= self._most_s:
                self._next_skip[self._kind] = 2
            elif self._since:
                self._failed()

    def stop(self) -> None:
        """No more bytes are expected."""
        self._waiting = False

    def _turn(self) -> None:
        """A callback that is ready keeps the loop from sleeping."""
        now = time.monotonic()
        if self._waiting and not self._since:  # only now has this turn of the loop sent all its data
            self._since = now
        if self._waiting and now - self._since <= self._most_s:
            self._loop.call_soon(self._turn)
            return
        self._awake = False
        if self._waiting:
            self._waiting = False
            self._failed()

    def _failed(self) -> None:
        self._skip[self._kind] = self._next_skip[self._kind]
        self._next_skip[self._kind] = min(SKIP_MAX, 2 * self._next_skip[self._kind])
