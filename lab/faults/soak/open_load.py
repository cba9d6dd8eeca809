"""An open load: requests arrive at random times at a given rate, however long the answers take."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from lab.faults.client import ALL, REFUSED_S, Body, Stream, opened, stream

INSISTS_S = 120.0
"""How long a client sends a request again that is refused with 503 or 429."""


@dataclass
class OpenLoad:
    """Requests arrive until the block ends; its end waits for the open ones.

        async with OpenLoad(doors, bodies, rate=4.0, rng=random.Random(1)) as load: ...

    A request begins at a random door. After a loss it continues at another one by its id, and when it is refused it is
    sent again, as clients do. Every second prompt has a salt, so it misses the caches.

    doors   the URLs of the nodes that take requests now
    given   the bodies, used in turn
    rate    requests per second
    """

    doors: Callable[[], Sequence[str]]
    given: Sequence[Body]
    rate: float
    rng: random.Random
    requests: list[tuple[int, Stream]] = field(default_factory=list, init=False)
    """(index of the body, its result)"""
    refused: int = field(default=0, init=False)
    _open: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _failed: list[BaseException] = field(default_factory=list, init=False)

    async def __aenter__(self) -> Self:
        self._session = opened(ALL)
        self._arriving = asyncio.create_task(self._arrive())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Raises what has ended the arrivals or a request before: then less was sent than the rate says."""
        self._arriving.cancel()
        ends = [*await asyncio.gather(self._arriving, *self._open, return_exceptions=True), *self._failed]
        await self._session.close()
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end

    @property
    def streams(self) -> list[Stream]:
        return [one for _, one in self.requests]

    @property
    def open(self) -> int:
        """Requests without their last token."""
        return len(self._open)

    async def _arrive(self) -> None:
        due = time.monotonic()
        while True:
            due += self.rng.expovariate(self.rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self._request(len(self.requests)))
            self._open.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.append(error)

    async def _request(self, number: int) -> None:
        which, one, name = number % len(self.given), Stream(), f"churn-{number}"
        self.requests.append((which, one))
        body = self.given[which] | ({"cache_salt": name} if number % 2 else {})
        until = time.monotonic() + INSISTS_S
        while True:
            doors = list(self.doors())
            self.rng.shuffle(doors)
            await stream(self._session, doors, body, name, one)
            if not one.error.startswith(("503:", "429:")) or time.monotonic() > until:
                return
            self.refused += 1
            one.error = ""
            await asyncio.sleep(REFUSED_S)
