"""Busy polling: keeps the event loop awake if the next bytes are likely to arrive within microseconds.

A loop that sleeps in epoll is woken by an interrupt to its core. Under a hypervisor that takes tens of microseconds on
both sides: the sender pays for it in the middle of its send, once for every piece that the receiver was too quick to
wait for. While a payload arrives, or an answer is due, the next bytes come sooner than that.

Waits are of two kinds, for the rest of a payload and for the next message. One in which nothing came for `most_s` was
polled in vain: the peer is slow or seldom asks, or it needs the core on which this loop polls. The next waits of its
kind then sleep: 2 of them, after the next failure 4, up to SKIP_MAX. Bytes that come while the loop polls start that
anew. On a link whose packets come within `most_s` of each other that is the whole transfer: a core is awake for it.
"""

from __future__ import annotations

import asyncio
import time

REST, NEXT = range(2)
SKIP_MAX = 64


class Polling:
    """Of one connection; tell it when a wait begins and when bytes have come."""

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
        """Nothing more is here, and something is expected."""
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
        """Bytes have come, and the rest of that payload is expected."""
        if self._waiting and self._kind == REST:
            if self._since:
                self._since = 0.0
                self._next_skip[REST] = 2
        else:
            self.end()
            self.begin(REST)

    def end(self) -> None:
        """Bytes have come."""
        if self._waiting:
            self._waiting = False
            if self._since:
                self._next_skip[self._kind] = 2

    def stop(self) -> None:
        """None are expected any more."""
        self._waiting = False

    def _turn(self) -> None:
        """A callback that is ready keeps the loop from sleeping."""
        now = time.monotonic()
        if self._waiting and not self._since:  # only now what this turn of the loop had to send is on its way
            self._since = now
        if self._waiting and now - self._since <= self._most_s:
            self._loop.call_soon(self._turn)
            return
        self._awake = False
        if self._waiting:
            self._waiting = False
            self._skip[self._kind] = self._next_skip[self._kind]
            self._next_skip[self._kind] = min(SKIP_MAX, 2 * self._next_skip[self._kind])
