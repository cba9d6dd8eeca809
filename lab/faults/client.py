"""A client that does not give up: it streams, and when its node is gone it goes on at another one by request id."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lab.bench.common.client import sse_events

RECONNECTS = 10
PAUSE_S = 0.05
REFUSED_S = 0.5


@dataclass(slots=True)
class Stream:
    """What came of one request."""

    begun: float = 0.0  # monotonic
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)  # monotonic, of each token
    reconnects: int = 0
    error: str = ""

    def longest_gap(self, since: float) -> float:
        """Seconds between two successive tokens of which the second came after `since`."""
        pairs = zip(self.at, self.at[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


def random_bodies(count: int, prompt_tokens: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Requests without a model; half of them are sampled."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    for number in range(count):
        prompt = [rng.randrange(3, 40_000) for _ in range(prompt_tokens)]
        drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        found.append({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True} | drawn)
    return found


@dataclass(slots=True)
class Load:
    """What the clients of one case sent: `streams[i]` is a request of client `clients[i]`."""

    streams: list[Stream] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    refused: int = 0
    over: bool = False  # nothing new is sent

    async def client(
        self,
        session: aiohttp.ClientSession,
        doors: Sequence[str],
        body: dict[str, Any],
        name: str,
        number: int,
        fresh: bool = False,
    ) -> None:
        """One request after the other. `fresh`: no prompt is found in a cache, and a request that is refused before its
        first token, as the API may while a role is missing, is counted and sent again."""
        sent = 0
        while not self.over or not sent:
            one = Stream()
            request_id = f"{name}-{number}-{sent}"
            sent += 1
            if fresh:
                await stream(session, doors, body | {"cache_salt": request_id}, request_id, one)
                if not one.tokens and one.error.startswith(("503:", "429:")):
                    self.refused += 1
                    await asyncio.sleep(REFUSED_S)
                    continue
                self._add(number, one)
            else:
                self._add(number, one)
                await stream(session, doors, body, request_id, one)

    def _add(self, number: int, one: Stream) -> None:
        self.streams.append(one)
        self.clients.append(number)


async def stream(
    session: aiohttp.ClientSession, doors: Sequence[str], body: dict[str, Any], request_id: str, into: Stream
) -> None:
    """Post to the first door, after a loss to the next one. `into` fills as tokens come; an error the API reports ends
    it."""
    body = body | {"stream": True, "return_token_ids": True}
    into.begun = time.monotonic()
    for attempt in range(RECONNECTS):
        headers = {"X-Request-Id": request_id}
        if attempt:
            headers["X-Resume-From"] = str(len(into.tokens))
            into.reconnects += 1
            await asyncio.sleep(PAUSE_S)
        url = f"{doors[attempt % len(doors)]}/v1/completions"
        try:
            async with session.post(url, json=body, headers=headers) as answer:
                if answer.status != 200:
                    into.error = f"{answer.status}: {await answer.text()}"
                    return
                if await _read(answer, into):
                    return
        except (aiohttp.ClientError, ConnectionError):
            continue
    into.error = f"no node answered in {RECONNECTS} attempts"


async def _read(answer: aiohttp.ClientResponse, into: Stream) -> bool:
    """True when the stream came to its end or an error."""
    async for _, event in sse_events(answer.content):
        if event is None:
            return True
        if "error" in event:
            into.error = str(event["error"])
            return True
        for token in event["choices"][0].get("token_ids") or []:
            into.tokens.append(token)
            into.at.append(time.monotonic())
    return False
