"""An OpenAI streaming client that records the time of every event."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from lab.bench.common.workload import Spec, as_text

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "openai-text": "/v1/completions"}
"""openai: token ids; openai-text: `Spec.text`; openai-chat: made-up words, one per id."""

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Unreachable(Exception):
    """A server cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server to measure."""

    name: str
    base_url: str
    model: str
    max_model_len: int | None  # None = unknown
    config: dict[str, Any] | None = None  # its resolved Config, when /debug/state shows one
    kernels: dict[str, str] | None = None  # that its engine chose, as /debug/state shows them


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it. Times in seconds; sent_s on the client's monotonic clock."""

    sent_s: float = 0.0
    queue_s: float = 0.0  # waited in the client for --max-concurrency; not part of the times below
    ttft_s: float = 0.0  # send to first event with a choice
    itl_s: list[float] = field(default_factory=list)  # seconds between such events
    e2e_s: float = 0.0  # send to last such event
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    usage_given: bool = False  # False: output_tokens counts events
    error: str | None = "not sent"  # None = success
    request_id: str = ""  # the server's


def open_session() -> aiohttp.ClientSession:
    """A session without a deadline and without a limit on connections. It sends OPENAI_API_KEY if that is set."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


async def find_server(session: aiohttp.ClientSession, name: str, base_url: str, model: str | None) -> Server:
    """Ask /v1/models. Raises Unreachable."""
    base_url = base_url.rstrip("/").removesuffix("/v1")
    try:
        async with session.get(f"{base_url}/v1/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
            raw = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise Unreachable(f"{base_url} does not answer ({str(error) or type(error).__name__})") from error
    if response.status != 200:
        raise Unreachable(f"{base_url}/v1/models answers {response.status}: {_error_text(raw)}")
    try:
        models = {entry["id"]: entry for entry in orjson.loads(raw)["data"]}
        chosen = models[model or next(iter(models))]
    except (ValueError, TypeError, KeyError, StopIteration) as error:
        have = f"serves no model {model!r}" if model else "lists no model"
        raise Unreachable(f"{base_url} {have} at /v1/models") from error
    config, kernels = await _of_node(session, base_url)
    return Server(name, base_url, chosen["id"], chosen.get("max_model_len"), config, kernels)


async def greedy_client(session: aiohttp.ClientSession, name: str, base_url: str) -> Client:
    """A client for the server's only model: it sends token ids and asks for greedy answers of full length. Raises
    Unreachable."""
    return Client(session, await find_server(session, name, base_url, None), "openai", GREEDY)


async def _of_node(
    session: aiohttp.ClientSession, base_url: str
) -> tuple[dict[str, Any] | None, dict[str, str] | None]:
    """The Config of a Mooncake node, which belongs in every result, and the kernels of its engine. Other servers have
    no such route."""
    try:
        async with session.get(f"{base_url}/debug/state", timeout=aiohttp.ClientTimeout(total=10)) as response:
            state = orjson.loads(await response.read())
            config, kernels = state.get("config"), (state.get("engine") or {}).get("kernels")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
        return None, None
    return config if isinstance(config, dict) else None, kernels if isinstance(kernels, dict) else None


class Client:
    """Sends requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, server: Server, backend: str, body: dict[str, Any]) -> None:
        """backend: a key of ENDPOINTS; body: fields of every request in addition to model, prompt and length."""
        self.server = server
        self._session = session
        self._backend = backend
        self._url = server.base_url + ENDPOINTS[backend]
        self._body = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}} | body

    async def run(
        self, specs: Sequence[Spec], max_concurrency: int | None, deadline_s: float, on_done: Callable[[], None]
    ) -> tuple[list[Outcome], float]:
        """Send every spec at its time. Returns outcomes in order and the seconds from start to the last one.

        Requests that still run `deadline_s` after the start are aborted and count as failed.
        """
        gate = asyncio.Semaphore(max_concurrency or len(specs) or 1)
        start = time.perf_counter()
        outcomes = [Outcome() for _ in specs]

        async def one(spec: Spec, outcome: Outcome) -> None:
            await asyncio.sleep(start + spec.at_s - time.perf_counter())
            arrived = time.perf_counter()
            async with gate:
                outcome.queue_s = time.perf_counter() - arrived
                await self.send(spec, outcome)
            on_done()

        tasks = [asyncio.create_task(one(*pair)) for pair in zip(specs, outcomes, strict=True)]
        _, late = await asyncio.wait(tasks, timeout=deadline_s) if tasks else (set(), set())
        for task in late:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return outcomes, time.perf_counter() - start

    async def ask(self, spec: Spec, what: str = "request") -> Outcome:
        """Send one request now. Raises Unreachable with the server's message if it fails."""
        outcome = Outcome()
        await self.send(spec, outcome)
        if outcome.error is not None:
            raise Unreachable(f"the {what} to {self.server.name} ({self.server.base_url}) failed: {outcome.error}")
        return outcome

    async def send(self, spec: Spec, outcome: Outcome) -> None:
        """Send one request now and fill `outcome`, also with errors."""
        outcome.error = "not finished before the deadline"
        outcome.sent_s = last = time.perf_counter()
        outcome.prompt_tokens = len(spec.token_ids)
        events = 0
        try:
            async with self._session.post(self._url, data=orjson.dumps(self._request(spec)), headers=_json) as response:
                if response.status != 200:
                    outcome.error = f"status {response.status}: {_error_text(await response.read())}"
                    return
                async for at, event in sse_events(response.content):
                    if event is None:
                        continue
                    if "error" in event:
                        outcome.error = f"in the stream: {_error_text(orjson.dumps(event))}"
                        return
                    if event.get("choices"):
                        outcome.itl_s.append(at - last)
                        last = at
                        events += 1
                        outcome.request_id = event.get("id") or ""
                    _take_usage(outcome, event.get("usage"))
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return
        except (ValueError, TypeError, AttributeError) as error:
            outcome.error = f"the answer is no OpenAI stream: {error}"
            return
        if not events:
            outcome.error = "the stream ended without a token"
            return
        outcome.ttft_s = outcome.itl_s.pop(0)
        outcome.e2e_s = last - outcome.sent_s
        if not outcome.usage_given:
            outcome.output_tokens = events
        outcome.error = None

    def _request(self, spec: Spec) -> dict[str, Any]:
        if self._backend == "openai-chat":
            messages = [{"role": "user", "content": as_text(spec.token_ids)}]
            return self._body | {"messages": messages, "max_completion_tokens": spec.output_len}
        prompt = spec.text if self._backend == "openai-text" else spec.token_ids
        return self._body | {"prompt": prompt, "max_tokens": spec.output_len}


_json = {"Content-Type": "application/json"}


async def sse_events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[float, dict[str, Any] | None]]:
    """Server-sent events with the time their last byte was read, None for [DONE]; comments are left out."""
    buffer = b""
    async for piece in content.iter_any():
        at = time.perf_counter()
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:"):
                yield at, None if data == b"[DONE]" else orjson.loads(data)


def _take_usage(outcome: Outcome, usage: dict[str, Any] | None) -> None:
    if usage:
        outcome.usage_given = True
        outcome.prompt_tokens = usage.get("prompt_tokens") or outcome.prompt_tokens
        outcome.output_tokens = usage.get("completion_tokens") or 0
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _error_text(raw: bytes) -> str:
    try:
        error = orjson.loads(raw)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, TypeError, KeyError):
        return raw[:300].decode("utf-8", "replace")
