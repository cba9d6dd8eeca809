"""Nodes and ranks that start and leave with the load: one joins by the command, and leaves when the load is gone. Every
stream of the clients is whole."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event

import aiohttp

from lab.faults.tiny import EXPERTS
from lab.faults.tiny import tiny_model as tiny_model_in
from lab.launch import rest
from lab.launch.cluster import ROOT
from tests.e2e.conftest import SMALL, Start, complete, settled, wait_until

NAME = "scaled-mixed-0"
CLIENTS, TOKENS = 12, 40
LONG_TOKENS = 400
SOON = ["--scale-out-ms", "400", "--scale-in-ms", "1500"]
SOON += ["--slo", "standard:ttft=60,tbt=60"]  # on a busy machine a step may take long
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


def command_of(run: Path, *flags: str) -> list[str]:
    """scripts/deploy/scale-local with these flags for what it starts."""
    local = ["env", f"MOONCAKE_RUN={run}", f"MOONCAKE_PYTHON={sys.executable}", "OMP_NUM_THREADS=1"]
    return [*local, str(ROOT / "scripts/deploy/scale-local"), "{action}", "{role}", "{name}", "{join}", *flags]


def test_a_node_joins_with_the_load_and_leaves_without_dropping_a_request(start: Start, tiny_model, tmp_path):
    flags = [*tiny_model, "--served-model-name", "tiny", "--max-num-seqs", "4", "--calibration-ms", "0"]
    scaling = ["--scale-command", shlex.join(command_of(tmp_path, *flags)), "--scale-nodes", "mixed=1..2", *SOON]
    with ended(tmp_path), start("mixed=1", *flags, *scaling) as cluster:
        node = cluster.nodes[0]
        found = asyncio.run(load_that_rises_and_falls(node.url))
        wait_until(lambda: f"stop {NAME}" in node.log.read_text(), "the command is told that the node has left")
        said = (tmp_path / f"{NAME}.log").read_text()
        log = node.log.read_text()
    assert found and set(found) == {(TOKENS, "[DONE]")} and len(found) > CLIENTS
    assert f"start {NAME}" in log and f"drain {NAME}" in log
    assert "asked this node to leave" in said and "will place them again" not in said


def test_a_rank_with_experts_joins_with_the_load_and_leaves_under_a_request(start: Start, tmp_path):
    """Requests get the tokens that the node computes without the rank, also one that is under way while it leaves."""
    model = [*tiny_model_in(tmp_path, **EXPERTS), "--max-model-len", "2048", *SMALL]
    flags = [*model, "--calibration-ms", "0", "--max-num-seqs", "6"]
    ranks = ["--expert-parallel-size", "2", "--max-expert-parallel-size", "3", *SOON, "--scale-in-ms", "300"]
    ranks += ["--expert-scale-command", shlex.join(command_of(tmp_path, "--num-threads", "1"))]
    with ended(tmp_path), start("mixed=1", *flags, *ranks) as cluster, ThreadPoolExecutor(CLIENTS) as clients:
        node = cluster.nodes[0]
        name = f"{node.name}-rank-0"

        def answer(tokens: int) -> str:
            text: str = complete(node.url, list(range(100, 231)), tokens, ignore_eos=True)["choices"][0]["text"]
            return text

        def ranks_are(ready: int) -> bool:
            state = rest.get(node.url + "/debug/state")
            counts = {"ready": ready, "starting": 0, "draining": 0}
            return counts.items() <= state["expert_scaling"].items() and state["engine"]["experts"]["width"] == ready

        def runs() -> bool:
            return bool(rest.get(node.url + "/debug/state")["engine"]["running"])

        def rise() -> str:
            """The text of all short answers of clients who ask until the rank is there."""
            there = Event()

            def client() -> set[str]:
                found = set[str]()
                while not there.is_set():
                    found.add(answer(TOKENS))
                    if ranks_are(3):
                        there.set()
                return found

            asking = [clients.submit(client) for _ in range(CLIENTS)]
            (text,) = set[str]().union(*(one.result(WITHIN_S) for one in asking))
            return text

        calm = answer(LONG_TOKENS)
        assert ranks_are(2)
        spanned = False
        while not spanned:  # once the rank must leave while a long request runs
            assert calm.startswith(rise())
            long = clients.submit(answer, LONG_TOKENS)
            wait_until(lambda: long.done() or runs(), "it runs")  # noqa: B023
            spanned = ranks_are(3)
            wait_until(partial(ranks_are, 2), "the rank leaves", WITHIN_S)
            spanned = spanned and not long.done()
            assert long.result(WITHIN_S) == calm
        log = node.log.read_text()
        assert f"start {name}" in log and f"drain {name}" in log
        experts = rest.get(node.url + "/debug/state")["engine"]["experts"]
        assert experts["times_masked"] == 0 and experts["pairs_by_rank"][2] > 0
        assert experts["decode_step_s"] > 0, "the rule knows what ranks can shorten"
        settled(cluster)
