"""Threads without an event loop that write into mapped memory of a peer: until they end, the peer's fence waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Hold:
    """One thread writes."""

    __slots__ = ("_has_news", "_released")

    def __init__(self, released: Callable[[Hold], None], has_news: Callable[[], bool]) -> None:
        self._released = released
        self._has_news = has_news

    def has_news(self) -> bool:
        """Whether something has arrived from the peer that its event loop has not seen yet: perhaps its end."""
        return self._has_news()

    def release(self) -> None:
        """Once, by any thread."""
        self._released(self)


class Holds:
    """Those of one peer, made on the event loop. `has_news`: see Hold; any thread may call it. `idle`: called on the
    event loop when a hold ends after `end`."""

    def __init__(self, has_news: Callable[[], bool], idle: Callable[[], None]) -> None:
        self._has_news, self._idle = has_news, idle
        self._loop = asyncio.get_running_loop()
        self._held: set[Hold] = set()
        self._ended = False

    def __len__(self) -> int:
        return len(self._held)

    def take(self) -> Hold | None:
        """None after `end`. Any thread may call. One of both sees the other: `end` the hold, or this the end."""
        hold = Hold(self._released, self._has_news)
        self._held.add(hold)
        if not self._ended:
            return hold
        self._released(hold)
        return None

    def end(self) -> None:
        """From now on there are no new ones."""
        self._ended = True

    def _released(self, hold: Hold) -> None:
        self._held.discard(hold)
        if self._ended:
            with suppress(RuntimeError):  # the loop is closed, and with it the transport
                self._loop.call_soon_threadsafe(self._idle)
