"""Runs the choices of one request concurrently: merges several generations into one stream of (choice, Output)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from net.http.common.errors import naming
from net.http.common.frontend import Choices, Frontend, Output
from net.http.openai.plan import Plan
from net.loop.tasks import awaited

Item = tuple[int, Output]


@dataclass(frozen=True, slots=True)
class Received(Output):
    """The part of an answer that its client has from a lost node. It comes first, with the output after it."""


def run(frontend: Frontend, plan: Plan, request_id: str) -> AsyncGenerator[Item, None]:
    """The outputs of all choices of the plan in order of arrival; ends when every choice has its finish_reason.

    Closing the generator closes every generation. The first error of any choice closes the others and is raised.
    """
    choices = Choices()
    generations = [_generation(frontend, plan, request_id, choice, choices) for choice in range(len(plan.choices))]
    return generations[0] if len(generations) == 1 else _merge(generations)


async def _generation(
    frontend: Frontend, plan: Plan, request_id: str, choice: int, choices: Choices
) -> AsyncGenerator[Item, None]:
    """One choice. Raises ApiError 400 if the frontend raises ValueError, RuntimeError for an end without reason."""
    name = request_id if len(plan.choices) == 1 else f"{request_id}-{choice}"
    more: dict[str, Any] = {} if plan.resume_from is None else {"again": True}
    if len(plan.choices) > 1:
        more["choices"] = choices
    elif plan.session:  # several answers to one prompt are no turns of one conversation
        more["session"] = plan.session
    stream = frontend.generate(
        plan.prompt_of(choice).token_ids,
        plan.choices[choice],
        request_id=name,
        service_class=plan.service_class,
        cache_salt=plan.cache_salt,
        **more,
    )
    known = plan.resume_from or 0  # tokens that the client has
    received: list[Output] = []
    try:
        async with aclosing(stream):
            async for output in stream:
                if 0 < len(output.token_ids) <= known:
                    known -= len(output.token_ids)
                    ended = output.finish_reason is not None
                    received.append(replace(output, finish_reason=None) if ended else output)
                    if not ended:
                        continue
                    output = replace(output, text="", token_ids=[], logprobs=None)
                if received:
                    yield choice, joined(received, Received)
                    received = []
                if plan.prompt_only:
                    yield choice, _prompt_alone(output)
                    return
                yield choice, output
                if output.finish_reason is not None:
                    return
    except ValueError as error:
        raise naming(str(error)) from error
    raise RuntimeError(f"generation {name} ended without a finish_reason")


def _prompt_alone(output: Output) -> Output:
    """The output without its generated token: an engine always generates at least one."""
    reason = "abort" if output.finish_reason == "abort" else "length"
    return replace(output, text="", token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None)


def joined(outputs: Sequence[Output], kind: type[Output] = Output) -> Output:
    """All deltas of one choice; counts and reasons of the last output."""
    last = outputs[-1]
    logprobs = [item for output in outputs for item in output.logprobs or ()]
    return kind(
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs if any(output.logprobs is not None for output in outputs) else None,
        finish_reason=last.finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_dropped_experts=last.num_dropped_experts,
        stop_reason=last.stop_reason,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


async def _merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    # One slot per stream bounds the memory if the client reads slowly: producers wait in put().
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks: list[asyncio.Task[None]] = []

    async def begin() -> None:
        """Start one stream per turn of the event loop: starting a thousand in one turn would block other requests."""
        for stream in streams:
            tasks.append(awaited(pump(stream)))
            await asyncio.sleep(0)

    beginning = awaited(begin())
    try:
        open_streams = len(streams)
        while open_streams:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        await _end([*tasks, beginning])


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the running tasks, one per turn of the event loop, because each notifies its nodes."""
    left = [task for task in tasks if not task.done()]
    try:
        while left:
            left.pop().cancel()
            await asyncio.sleep(0)
    finally:
        for task in left:  # this function was cancelled: no further turns
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
