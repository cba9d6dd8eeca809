"""Busy polling: the event loop does not sleep in the moment in which the next bytes come.

A loop that sleeps in epoll is woken by an interrupt to its core. Under a hypervisor that takes tens of microseconds on
both sides: the sender pays for it in the middle of its send, once for every piece that the receiver was too quick to
wait for. While a payload arrives, or an answer is due, the next bytes come sooner than that.

Waits are of two kinds, in the middle of a payload and between messages. After a wait that was short the loop stays
awake in the next one of its kind, at most `most_s`; after one that took longer it sleeps, until one is short again. So
a slow network, or a peer that seldom asks, costs a single `most_s` and nothing after that.
"""

from __future__ import annotations

import asyncio
import time

MIDDLE, BETWEEN = 0, 1


class Polling:
    """Of one connection; tell it when a wait begins and when bytes have come."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._loop = asyncio.get_running_loop()
        self._kind = BETWEEN
        self._since = 0.0  # when the wait began
        self._waiting = False
        self._awake = False  # `_turn` is scheduled
        self._pays = [True, False]  # per kind: the last wait was short

    def begin(self, kind: int) -> None:
        """Nothing more is here, and something is expected."""
        self._kind = kind
        self._since = time.monotonic()
        self._waiting = True
        if self._pays[kind] and not self._awake:
            self._awake = True
            self._loop.call_soon(self._turn)

    def end(self) -> None:
        """Bytes have come, or none are expected any more."""
        if self._waiting:
            self._waiting = False
            self._pays[self._kind] = time.monotonic() - self._since <= self._most_s

    def _turn(self) -> None:
        """A callback that is ready keeps the loop from sleeping."""
        if self._waiting and self._pays[self._kind] and time.monotonic() - self._since <= self._most_s:
            self._loop.call_soon(self._turn)
        else:
            self._awake = False
