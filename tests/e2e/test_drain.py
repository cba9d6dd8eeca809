"""Signals while streams run: after the first what runs is finished, after the second it ends with an error."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable

import aiohttp
import pytest

from lab.launch import rest
from lab.launch.cluster import ROOT, LocalCluster
from lab.launch.nodes import Node
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


async def drained_under_load(cluster: LocalCluster, leaver: Node, door: Node) -> list[list[str]]:
    """Streams through both nodes, half of them begun when the leaver is asked to go."""
    begun = asyncio.Event()
    streams = [asyncio.create_task(stream(node, 60, lambda number: begun.set())) for node in (leaver, door) * 3]
    await begun.wait()
    leaver.expected_dead = True
    command = [
        sys.executable,
        str(ROOT / "mooncake.py"),
        "drain",
        "--url",
        leaver.url,
        "--timeout-s",
        "60",
        "--grace-s",
        "3",
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    while not (await asyncio.to_thread(rest.get, leaver.url + "/drain"))["draining"]:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    streams += [asyncio.create_task(stream(node, 20, lambda number: None)) for node in (leaver, door)]
    events = await asyncio.gather(*streams)
    out, _ = await process.communicate()
    assert process.returncode == 0 and b"has left" in out
    return events


def test_drain_drops_no_request(start: Start, tiny_model):
    with start("mixed=2", *tiny_model, "--served-model-name", "tiny") as cluster:
        leaver, door = cluster.nodes
        begun = {node.name: len(node.log.read_text()) for node in cluster.nodes}  # a busy start may cost a connection
        events = asyncio.run(drained_under_load(cluster, leaver, door))
        assert leaver.process.wait(30) == 0
        with pytest.raises(rest.RestError, match="answers 409"):
            rest.post(door.url + "/drain", {})
        assert "will place them again" not in leaver.log.read_text()
        assert all("without a bye" not in node.log.read_text()[begun[node.name] :] for node in (leaver, door))
    assert [e[-1] for e in events] == ["[DONE]"] * 8
    assert {json.loads(e[-2])["choices"][0]["finish_reason"] for e in events} == {"length"}
