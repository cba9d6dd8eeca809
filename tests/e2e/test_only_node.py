"""The default shape, one node per role: the only node of a role is killed with -9 under streams and started again by
the same command. Every stream goes on with the same tokens; the streams of its own clients are test_reconnect.py's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest

from lab.faults.checks import differences, form
from lab.faults.client import Stream, random_bodies, stream
from lab.launch.cluster import DEFAULT_NODES, LocalCluster
from tests.e2e.conftest import Start, complete, model_of, settled, timeline

SEED = 20261122
STREAMS, PROMPT, TOKENS = 8, 500, 120
ATTEMPTS = 5
FLAGS = ["--max-num-batched-tokens", "64"]  # prompts take a while


@pytest.fixture(scope="module")
def cluster(start: Start, tiny_model: list[str]):
    with start(DEFAULT_NODES, *tiny_model, *FLAGS) as running:
        yield running


async def streams(
    url: str, bodies: list[dict[str, Any]], name: str, due: Callable[[list[Stream]], bool], fault: Callable[[], Any]
) -> list[Stream]:
    """All at once; `fault` is called as soon as it is `due`, and must not block for long."""
    found = [Stream() for _ in bodies]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        works = [
            asyncio.create_task(stream(session, [url], body, f"{name}-{number}", one))
            for number, (body, one) in enumerate(zip(bodies, found, strict=True))
        ]
        while not due(found):
            assert not all(work.done() for work in works), "all was over before the fault"
            await asyncio.sleep(0.002)
        fault()
        await asyncio.gather(*works)
    return found


def half_way(found: list[Stream]) -> bool:
    return sum(len(one.tokens) >= TOKENS // 4 for one in found) >= len(found) / 2


def one_has_begun(found: list[Stream]) -> bool:
    """The other prompts are being computed or wait."""
    return any(one.tokens for one in found)


def cut(
    cluster: LocalCluster,
    victim: str,
    door: str,
    bodies: list[dict[str, Any]],
    calm: list[Stream],
    due: Callable[[list[Stream]], bool],
    least: int,
) -> None:
    """Kill the node under streams and start it again, until a stream has lost it that had `least` tokens to come: on a
    busy machine all may be computed before the signal comes. The tokens are always those of `calm`. least: 0 if no
    request needs the node."""
    url = cluster[door].url
    for attempt in range(ATTEMPTS):
        name = f"{victim}-cut{attempt}"
        salted = [body | {"cache_salt": name} for body in bodies]  # computed, not found
        found = asyncio.run(streams(url, salted, name, due, lambda: cluster.repeat(victim)))
        assert differences(victim, calm, found) == []
        form(cluster)
        settled(cluster)
        left = [
            body["max_tokens"] - event["detail"]["tokens"]
            for number, body in enumerate(bodies)
            for event in timeline(url, f"{name}-{number}")["events"]
            if event["event"] == "attempt_failed"
        ]
        if max(left, default=0) >= least:
            return
        print(f"attempt {attempt}: {victim} ended when its part was done; tokens to come {left}")
    raise AssertionError("nothing was cut")


def given(cluster: LocalCluster) -> list[dict[str, Any]]:
    model = model_of(cluster["store-0"].url)
    return [body | {"model": model} for body in random_bodies(STREAMS, PROMPT, TOKENS, SEED)]


@pytest.fixture(scope="module")
def calm(cluster: LocalCluster) -> list[Stream]:
    print(f"seed {SEED}")
    return asyncio.run(streams(cluster["store-0"].url, given(cluster), "calm", half_way, lambda: None))


@pytest.mark.parametrize(
    ("victim", "door", "due"),
    [
        ("decode-0", "store-0", half_way),
        ("prefill-0", "store-0", one_has_begun),
        ("store-0", "prefill-0", half_way),
    ],
)
def test_a_restart_of_the_only_node_of_a_role_is_a_pause(cluster: LocalCluster, calm, victim, door, due):
    cut(cluster, victim, door, given(cluster), calm, due, least=victim != "store-0")


def test_a_request_that_comes_while_a_role_is_missing_waits_for_the_restart(cluster: LocalCluster):
    url = cluster["store-0"].url
    alone = complete(url, list(range(900, 1000)), 8)["choices"][0]["text"]
    cluster.kill("decode-0")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, url, list(range(900, 1000)), 8)
        cluster.restart("decode-0")
        assert answer.result()["choices"][0]["text"] == alone
