"""One worker behind this acceptor: whether it answers, its load, and the prefixes it holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp

from cache.block import BlockKey
from engine.backends.load import Costs, Load
from engine.backends.prefixes import Prefixes
from engine.backends.told import told
from engine.config.backend_address import Address
from engine.config.flags import UsageError
from net.loop.tasks import awaited, keep

if TYPE_CHECKING:
    from net.kv_events.subscriber import EventSubscriber  # ZeroMQ

log = logging.getLogger("mooncake.backends")

POLL_S = 1.0
AWAY_POLL_S = 0.25
ANSWER_S = 3.0
SILENT_POLLS = 3
"""After this number of questions in a row without an answer, the worker is given up. A refused connection suffices."""


class Worker:
    """`lost(name)` is called when it stops answering. `session` has no total timeout."""

    def __init__(
        self,
        address: Address,
        root: BlockKey,
        session: aiohttp.ClientSession,
        lost: Callable[[str], None],
        common: Costs,
    ) -> None:
        """root: of the keys of requests without a salt. Raises UsageError if its events cannot be followed."""
        self.name, self.url = address.name, address.url
        self.load, self.prefixes = Load(common), Prefixes(root)
        self.model = ""  # the name that it serves
        self.away: str | None = "has not answered yet"  # why nothing is sent to it; None: it answers
        self.events: EventSubscriber | None = None
        self._session, self._lost = session, lost
        self._silent = 0  # questions in a row without an answer
        self._asking: set[asyncio.Task[aiohttp.ClientResponse]] = set()  # without an answer yet
        self._answered, self._doubted = asyncio.Event(), asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        if address.events is not None:
            from net.kv_events.subscriber import EventSubscriber

            self.events = EventSubscriber(address.events, address.replay, self.prefixes.apply, self.prefixes.forget)

    def start(self) -> None:
        if self.events is None:
            log.warning("%s: without events= its prefixes are unknown; placement sees only its load", self.name)
        else:
            try:
                self.events.start()
            except OSError as error:
                raise UsageError(f"--backend: {error}") from None
        self._polling = keep(self._poll, f"load of {self.name}")

    async def seen(self) -> None:
        """Returns when it has answered or refused for the first time."""
        await self._answered.wait()

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling
        if self.events is not None:
            await self.events.close()

    async def ask(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """A streamed completion, at its headers. Raises aiohttp.ClientError or OSError, also when the worker is given
        up before it has answered: one that hangs would let the request wait until its deadline."""
        asking = awaited(self._post(body))
        self._asking.add(asking)
        try:
            return await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.away is None or (task is not None and task.cancelling()):
                raise
            raise aiohttp.ServerDisconnectedError(self.away) from None
        finally:
            self._asking.discard(asking)

    async def _post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        return await self._session.post(f"{self.url}/v1/completions", json=body)

    def look(self) -> None:
        """Ask it soon whether it is there."""
        self._doubted.set()

    def gone(self, reason: str) -> None:
        """Nothing is sent to it until it answers again."""
        self._answered.set()
        if self.away is None:
            log.warning("%s is given up: %s", self.name, reason)
            self.away = reason
            self.load.tells(time.monotonic(), replace(self.load.told, running=0, waiting=0))
            for asking in self._asking:
                asking.cancel()
            self._lost(self.name)
        self.away = reason

    def report(self) -> dict[str, Any]:
        """JSON-ready, for /debug/state."""
        return {
            "name": self.name,
            "url": self.url,
            "model": self.model,
            "away": self.away,
            "running": self.load.running,
            "waiting": self.load.waiting,
            "prefix_blocks": len(self.prefixes),
            "block_size": self.prefixes.block_size,
            "prefill_coefficients": self.load.prefill.coefficients,
            "decode_coefficients": self.load.decode.coefficients,
            "events": None if self.events is None else {"applied": self.events.applied, "lost": self.events.lost},
        }

    async def _poll(self) -> None:
        while True:
            try:
                await self._ask()
                self._silent = 0
            except (TimeoutError, aiohttp.ServerTimeoutError) as error:
                self._silent += 1
                if self._silent >= SILENT_POLLS or self.away is not None:
                    self.gone(f"does not answer within {ANSWER_S:g} s ({type(error).__name__})")
            except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
                self.gone(str(error) or type(error).__name__)
            self._answered.set()
            self._doubted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self.away is None else AWAY_POLL_S):
                    await self._doubted.wait()

    async def _ask(self) -> None:
        """Raises what aiohttp raises, and ValueError, LookupError or TypeError for an answer of another form."""
        found = told(await self._text("/metrics"))
        again = found.started != self.load.told.started
        self.load.tells(time.monotonic(), found)
        if self.away is not None:
            async with asyncio.timeout(ANSWER_S), self._session.get(f"{self.url}/v1/models") as answer:
                answer.raise_for_status()
                self.model = str((await answer.json())["data"][0]["id"])
        if (self.away is not None or again) and self.events is not None:
            self.events.restarted()
        if self.away is not None:
            log.info("%s answers and serves %s", self.name, self.model)
            self.away = None

    async def _text(self, path: str) -> str:
        async with asyncio.timeout(ANSWER_S), self._session.get(self.url + path) as answer:
            answer.raise_for_status()
            return await answer.text()
