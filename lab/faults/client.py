"""Clients that do not give up: they stream, and when their node is gone they continue at another one by request id."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from lab.bench.common.client import sse_events

RECONNECTS = 10
PAUSE_S = 0.05
REFUSED_S = 0.5
REQUEST_S = 180.0
STALLED_S = 2 * REQUEST_S
"""A load that has got no token for so long will not get what is waited for."""

ALL = aiohttp.ClientTimeout(total=REQUEST_S)

Body = dict[str, Any]


@dataclass(slots=True)
class Stream:
    """The result of one request."""

    begun: float = 0.0  # monotonic
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)  # monotonic, of each token
    reconnects: int = 0
    dropped_experts: int = 0  # results of experts that the answer did without, as its usage says
    error: str = ""

    def longest_gap(self, since: float) -> float:
        """Seconds between two successive tokens of which the second arrived after `since`."""
        pairs = zip(self.at, self.at[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


def random_bodies(count: int, prompt_tokens: int, tokens: int, seed: int) -> list[Body]:
    """Requests that name no model; half of them are sampled."""
    rng = random.Random(seed)
    found: list[Body] = []
    for number in range(count):
        prompt = [rng.randrange(3, 40_000) for _ in range(prompt_tokens)]
        drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        found.append({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True} | drawn)
    return found


def opened(timeout: aiohttp.ClientTimeout = ALL, api_key: str | None = None) -> aiohttp.ClientSession:
    """A session with as many connections as there are requests."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=headers)


@dataclass
class Load:
    """Clients, each of which sends one request after the other.

        async with Load([url], bodies, "round") as load: ...

    They start with the block. Its end waits for the running requests. A client whose request failed pauses before its
    next one.

    doors     URLs for requests: the first door, after a loss the next one
    given     the bodies: client n sends the bodies n, n + clients, ... in turn
    name      name of the load, for request ids
    clients   number of clients; 0 = one per body
    once      each client sends one request
    salted    salts make every prompt miss the caches
    insists   a request that is refused before its first token, as the API may while a role is missing, is counted and
              sent again. It may change meanwhile: what counts is its value when the request begins
    in_turn   request n goes only to door n, modulo their number, like from a balancer: a broken connection is an
              error. `doors` may change meanwhile
    """

    doors: Sequence[str]
    given: Sequence[Body]
    name: str
    clients: int = 0
    once: bool = False
    salted: bool = False
    insists: bool = False
    in_turn: bool = False
    timeout: aiohttp.ClientTimeout = ALL
    api_key: str | None = None
    requests: list[tuple[int, Stream]] = field(default_factory=list, init=False)
    """(index of the body, its result)"""
    refused: int = field(default=0, init=False)
    _over: bool = field(default=False, init=False)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    async def __aenter__(self) -> Self:
        self._over = self.once
        self._session = opened(self.timeout, self.api_key)
        self._tasks = [asyncio.create_task(self._client(n)) for n in range(self.clients or len(self.given))]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._over = True
        for task in self._tasks if error else ():
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=error is not None)
        finally:
            await self._session.close()

    @property
    def streams(self) -> list[Stream]:
        return [one for _, one in self.requests]

    async def until(self, due: Callable[[], bool]) -> None:
        """Wait until `due()`, or until all clients have ended. Raises TimeoutError if no token comes for STALLED_S."""
        count, since = -1, time.monotonic()
        while not due() and not all(task.done() for task in self._tasks):
            now, before = time.monotonic(), count
            count = sum(len(one.tokens) for one in self.streams)
            if count != before:
                since = now
            elif now - since > STALLED_S:
                raise TimeoutError(f"no request has got a token for {STALLED_S:g} s")
            await asyncio.sleep(0.005)

    def with_tokens(self, least: int) -> int:
        """The number of requests with at least `least` tokens."""
        return sum(len(one.tokens) >= least for one in self.streams)

    def under_way(self, most: int) -> int:
        """The number of requests with a token and at most `most` of them, and without an error: if they want more
        tokens, they are not over."""
        return sum(0 < len(one.tokens) <= most and not one.error for one in self.streams)

    async def _client(self, number: int) -> None:
        turn = number
        while True:
            one = await self._request(turn % len(self.given), f"{self.name}-{turn}")
            if self._over:
                return
            if one.error:
                await asyncio.sleep(REFUSED_S)
            turn += len(self._tasks)

    async def _request(self, body: int, request_id: str) -> Stream:
        one = Stream()
        doors, attempts = self.doors, RECONNECTS
        if self.in_turn:
            doors, attempts = [doors[len(self.requests) % len(doors)]], 1
        self.requests.append((body, one))
        insists = self.insists
        salt = {"cache_salt": request_id} if self.salted else {}
        await stream(self._session, doors, self.given[body] | salt, request_id, one, attempts)
        if insists and not one.tokens and one.error.startswith(("503:", "429:")):
            self.refused += 1
            self.requests = [pair for pair in self.requests if pair[1] is not one]
        return one


async def each_once(
    url: str, bodies: Sequence[Body], name: str, api_key: str | None = None, at_once: int | None = None
) -> list[Stream]:
    """The result of every body, with all requests concurrent, or `at_once` at a time."""
    found = [Stream() for _ in bodies]
    turns = asyncio.Semaphore(at_once or len(bodies))

    async def one(number: int) -> None:
        async with turns:
            await stream(session, [url], bodies[number], f"{name}-{number}", found[number])

    async with opened(api_key=api_key) as session:
        await asyncio.gather(*(one(number) for number in range(len(bodies))))
    return found


async def each_at(
    arrivals: Sequence[tuple[float, str]], bodies: Sequence[Body], name: str, api_key: str | None = None
) -> list[Stream]:
    """The result of every body, sent at its time to its node. arrivals: (seconds from now, URL) of each body."""
    found = [Stream() for _ in bodies]
    begin = time.monotonic()

    async def one(number: int) -> None:
        at_s, url = arrivals[number]
        await asyncio.sleep(max(0.0, begin + at_s - time.monotonic()))
        await stream(session, [url], bodies[number], f"{name}-{number}", found[number])

    async with opened(api_key=api_key) as session:
        await asyncio.gather(*(one(number) for number in range(len(bodies))))
    return found


async def stream(
    session: aiohttp.ClientSession,
    doors: Sequence[str],
    body: Body,
    request_id: str,
    into: Stream,
    attempts: int = RECONNECTS,
) -> None:
    """Post to the first door, after a loss to the next one. `into` fills as tokens arrive; an error from the API ends
    it. A stream that has tokens already continues behind them."""
    body = body | {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    into.begun = into.begun or time.monotonic()
    lost = ""
    for attempt in range(attempts):
        headers = {"X-Request-Id": request_id}
        if attempt or into.tokens:
            headers["X-Resume-From"] = str(len(into.tokens))
        if attempt:
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
                lost = f"{url} ended the stream without its last event"
        except (aiohttp.ClientError, ConnectionError) as error:
            lost = f"{url}: {error!r}"
        except TimeoutError:  # timeout of the whole request
            into.error = f"no end after {time.monotonic() - into.begun:.0f} s"
            return
    into.error = f"no whole answer in {attempts} attempts, the last one: {lost}"


async def _read(answer: aiohttp.ClientResponse, into: Stream) -> bool:
    """Whether the stream reached its end or an error."""
    async for _, event in sse_events(answer.content):
        if event is None:
            return True
        if "error" in event:
            into.error = str(event["error"])
            return True
        into.dropped_experts += (event.get("usage") or {}).get("dropped_experts", 0)  # in the last event only
        for choice in event["choices"]:
            for token in choice.get("token_ids") or []:
                into.tokens.append(token)
                into.at.append(time.monotonic())
    return False
