"""Greedy completions by token ids, from servers that also answer token ids, as vLLM does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from lab.bench.common.client import GREEDY, Unreachable, open_session, sse_events

ANSWER_S = 300.0
JSON = {"Content-Type": "application/json"}  # vLLM refuses others


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion as the client saw it. Times in seconds."""

    tokens: list[int] = field(repr=False)
    ttft_s: float
    e2e_s: float
    cached_tokens: int  # of the prompt, if the server tells (--enable-prompt-tokens-details)


def ask(url: str, token_ids: Sequence[int], max_tokens: int, more: Mapping[str, Any] = MappingProxyType({})) -> Answer:
    """One completion on a connection of its own. `more`: further fields of the body. Raises Unreachable with the
    server's words."""

    async def once() -> Answer:
        async with open_session() as session:
            return await complete(session, url, token_ids, max_tokens, more)

    return asyncio.run(once())


async def ask_together(
    requests: Sequence[tuple[str, Sequence[int], float]],
    max_tokens: int,
    meanwhile: Awaitable[Any] | None = None,
    after_s: float = 0.0,
) -> list[Answer]:
    """(URL, prompt, seconds after the start) of each request -> its answer, in order. `meanwhile` begins after
    `after_s` seconds. Raises Unreachable."""

    async def one(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], at_s: float) -> Answer:
        await asyncio.sleep(at_s)
        return await complete(session, url, prompt, max_tokens)

    async def disturb() -> None:
        if meanwhile is not None:
            await asyncio.sleep(after_s)
            await meanwhile

    async with open_session() as session:
        answers, _ = await asyncio.gather(
            asyncio.gather(*(one(session, *request) for request in requests)),
            disturb(),
        )
    return answers


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    token_ids: Sequence[int],
    max_tokens: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Answer:
    """As `ask`, in a session of the caller. The model is called m. Raises Unreachable."""
    body = {"model": "m", "prompt": list(token_ids), "max_tokens": max_tokens, "stream": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}, **GREEDY, **more}
    tokens: list[int] = []
    times: list[float] = []
    cached = 0
    request = session.post(f"{url}/v1/completions", data=orjson.dumps(body), headers=JSON)
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(ANSWER_S), request as answer:
            if answer.status != 200:
                raise Unreachable(f"{url} answers {answer.status}: {(await answer.text())[:500]}")
            async for at, event in sse_events(answer.content):
                if event is None:
                    continue
                if "error" in event:
                    raise Unreachable(f"{url} fails in the stream: {event['error']}")
                for choice in event.get("choices") or ():
                    if choice.get("token_ids"):
                        tokens += choice["token_ids"]
                        times.append(at)
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or cached
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unreachable(f"{url} does not answer ({str(error) or type(error).__name__})") from error
    if len(tokens) != max_tokens:
        raise Unreachable(f"{url} answers {len(tokens)} token ids and not {max_tokens}")
    return Answer(tokens, times[0] - begun, times[-1] - begun, cached)
