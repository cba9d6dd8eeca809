"""Signals while streams run: after the first what runs is finished, after the second it ends with an error."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable

import aiohttp

from scripts.nodes import Node
from tests.e2e.conftest import Start

SHORT, LONG = 40, 2000
"""Tokens; the long stream is cut off by the second signal, which comes when the short one is whole."""


async def stream(node: Node, tokens: int, on_event: Callable[[int], None]) -> list[str]:
    """The events of one stream; `on_event` gets their number so far."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    events: list[str] = []
    async with aiohttp.ClientSession() as session, session.post(node.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: "):
                events.append(line.removeprefix(b"data: ").decode().strip())
                on_event(len(events))
    return events


async def two_streams(node: Node) -> tuple[list[str], list[str]]:
    begun = asyncio.Event()

    def term(number: int) -> None:
        if number == 2:
            node.expected_dead = True
            node.process.send_signal(signal.SIGTERM)

    long = asyncio.create_task(stream(node, LONG, lambda number: begun.set()))
    await begun.wait()
    short = await stream(node, SHORT, term)
    assert not long.done(), "the long stream must outlive the short one"
    node.process.send_signal(signal.SIGTERM)
    return short, await long


def test_the_first_signal_waits_for_streams_and_the_second_does_not(start: Start, tiny_model):
    with start("mixed=1", *tiny_model, "--served-model-name", "tiny", "--drain-timeout-ms", "60000") as cluster:
        short, long = asyncio.run(two_streams(cluster.nodes[0]))
        assert cluster.nodes[0].process.wait(60) == 0
    assert short[-1] == "[DONE]"
    assert json.loads(short[-2])["choices"][0]["finish_reason"] == "length"
    assert "shutting down" in json.loads(long[-1])["error"]["message"]
    assert len(long) < LONG
