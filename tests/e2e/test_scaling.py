"""Nodes that start and leave with the load: one joins by the command, drains when the load is gone, and leaves. Every
stream of the clients is whole."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp

from lab.launch import rest
from lab.launch.cluster import ROOT
from tests.e2e.conftest import Start, wait_until

NAME = "scaled-mixed-0"
CLIENTS, TOKENS = 12, 40
WITHIN_S = 150


@contextmanager
def ended(run: Path) -> Iterator[None]:
    """Ends what the command started, whatever happens."""
    try:
        yield
    finally:
        for path in run.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


async def stream(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    """(tokens of one answer, its last event)"""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    events = []
    async with session.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: "):
                events.append(line.removeprefix(b"data: ").decode().strip())
    return json.loads(events[-2])["usage"]["completion_tokens"], events[-1]


def roles(url: str) -> dict[str, int]:
    counts: dict[str, int] = rest.get(url + "/debug/state")["scaling"]["roles"]["mixed"]
    return counts


async def until(url: str, **wanted: int) -> None:
    """Wait until the node at `url` counts this."""
    async with asyncio.timeout(WITHIN_S):
        while not wanted.items() <= (await asyncio.to_thread(roles, url)).items():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)


async def load_that_rises_and_falls(url: str) -> list[tuple[int, str]]:
    """CLIENTS streams one after the other until two nodes are ready, then one client until one is left."""
    enough, over = asyncio.Event(), asyncio.Event()
    found: list[tuple[int, str]] = []

    async def client(stop: asyncio.Event) -> None:
        while not stop.is_set():
            found.append(await stream(session, url))

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(client(enough if number else over))
        try:
            await until(url, ready=2)
            enough.set()
            await until(url, ready=1, starting=0, draining=0)
        finally:
            enough.set()
            over.set()
    return found


def test_a_node_joins_with_the_load_and_leaves_without_dropping_a_request(start: Start, tiny_model, tmp_path):
    flags = [*tiny_model, "--served-model-name", "tiny", "--max-num-seqs", "4", "--calibration-ms", "0"]
    local = ["env", f"MOONCAKE_RUN={tmp_path}", f"MOONCAKE_PYTHON={sys.executable}", "OMP_NUM_THREADS=1"]
    local += [str(ROOT / "scripts/deploy/scale-local"), "{action}", "{role}", "{name}", "{join}", *flags]
    scaling = ["--scale-command", shlex.join(local), "--scale-nodes", "mixed=1..2"]
    scaling += ["--slo", "standard:ttft=60,tbt=60"]  # on a busy machine a step may take long
    scaling += ["--scale-out-ms", "400", "--scale-in-ms", "1500"]
    with ended(tmp_path), start("mixed=1", *flags, *scaling) as cluster:
        node = cluster.nodes[0]
        found = asyncio.run(load_that_rises_and_falls(node.url))
        wait_until(lambda: f"stop {NAME}" in node.log.read_text(), "the command is told that the node has left")
        said = (tmp_path / f"{NAME}.log").read_text()
        log = node.log.read_text()
    assert found and set(found) == {(TOKENS, "[DONE]")} and len(found) > CLIENTS
    assert f"start {NAME}" in log and f"drain {NAME}" in log
    assert "asked this node to leave" in said and "will place them again" not in said
