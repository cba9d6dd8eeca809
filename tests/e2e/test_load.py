"""Many requests at once, clients that hang up, nodes that die: afterwards every block is accounted for."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest

from lab.faults.checks import form
from lab.launch import rest
from tests.e2e.conftest import Start, complete, model_of, settled

SEED = 20261121
TRIES = 8


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], hang_up_after: int | None) -> str:
    """Text of one streamed completion; hangs up after so many events (0: before the first)."""
    text = ""
    async with session.post(f"{url}/v1/completions", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        events = 0
        if hang_up_after == 0:
            response.close()
            return text
        async for line in response.content:
            if line.startswith(b"data: {"):
                import orjson

                event = orjson.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                events += 1
                if events == hang_up_after:
                    response.close()
                    break
    return text


@pytest.mark.parametrize("nodes", ["prefill=1,decode=1,store=1", pytest.param("mixed=1", marks=pytest.mark.heavy)])
def test_sixty_four_streams_with_random_aborts_leave_nothing_behind(start: Start, tiny_model, nodes):
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    # Room for some 700 tokens of KV at once: far less than 64 requests want, so they queue and are preempted.
    with start(nodes, *tiny_model, "--kv-cache-bytes", "2M", "--max-model-len", "512") as cluster:
        urls = [node.url for node in cluster.nodes]
        shared = [rng.randrange(3, 40000) for _ in range(100)]

        async def run() -> list[Any]:
            async with aiohttp.ClientSession() as session:
                works = []
                for i in range(64):
                    prompt = shared[: rng.randrange(0, 100)] + [
                        rng.randrange(3, 40000) for _ in range(rng.randrange(1, 60))
                    ]
                    body = {
                        "model": model_of(urls[0]),
                        "prompt": prompt,
                        "max_tokens": rng.randrange(1, 60),
                        "temperature": rng.choice([0, 1]),
                        "ignore_eos": True,
                    }
                    hang_up = rng.choice([None, None, 0, 1, 5, 20])
                    works.append(stream(session, urls[i % len(urls)], body, hang_up))
                return await asyncio.gather(*works)

        texts = asyncio.run(run())
        assert sum(bool(text) for text in texts) > 32
        settled(cluster)
        again = complete(urls[0], shared, 8)
        assert again["usage"]["completion_tokens"] == 8


def test_death_of_a_decode_node_is_a_pause(start: Start, tiny_model):
    """The node that decodes stands still, later it is killed: the stream goes on elsewhere with the same tokens, and
    what the one that stood still makes of its request is nobody's."""
    with start("prefill=1,decode=2,store=1", *tiny_model) as cluster:
        url = cluster["store-0"].url
        prompt, length = list(range(1000, 1100)), 300
        body = {"model": model_of(url), "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        alone = complete(url, prompt, length, ignore_eos=True)["choices"][0]["text"]
        stopped: list[int] = []

        def stop(node: str) -> None:
            stopped.append(cluster[node].pid)
            os.kill(stopped[0], signal.SIGSTOP)

        assert asyncio.run(stream_and(stop, url, body, "decode")) == alone
        assert stopped
        os.kill(stopped[0], signal.SIGCONT)
        assert set(settled(cluster)) == {node.name for node in cluster.nodes}
        assert asyncio.run(stream_and(cluster.kill, url, body, "decode")) == alone
        cluster_left = settled(cluster)
        assert len(cluster_left) == 3


def test_death_of_a_prefill_node_in_the_middle_of_a_prompt_is_a_pause(start: Start, tiny_model):
    """On a machine that stops now and then the prompt may be done when the node dies: then with another prompt."""
    with start("prefill=2,decode=1,store=1", *tiny_model, "--max-num-batched-tokens", "16") as cluster:
        url = cluster["store-0"].url
        for number in range(TRIES):
            prompt = [3 + number + i * 7 % 40000 for i in range(1900)]
            alone = complete(url, prompt, 8, cache_salt="alone")["choices"][0]["text"]
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(complete, url, prompt, 8)
                victim = computing(cluster, answer, "prefill-0", "prefill-1")
                if victim is not None:
                    cluster.kill(victim, signal.SIGKILL)
                assert answer.result()["choices"][0]["text"] == alone
            resumed = rest.get(f"{url}/debug/requests/{answer.result()['id']}")
            if [event["detail"]["reason"] for event in resumed["events"] if event["event"] == "attempt_failed"]:
                break
            print(f"prompt {number}: {victim} was killed too late to matter")
            if victim is not None:
                cluster.restart(victim)
                form(cluster)
        else:
            raise AssertionError(f"no prefill node could be killed in the middle of one of {TRIES} prompts")
        settled(cluster)


def computing(cluster: Any, answer: Future[Any], *names: str) -> str | None:
    """The first of these nodes that has a request; None when the answer is there."""
    while not answer.done():
        for name in names:
            held = rest.get(f"{cluster[name].url}/debug/state")["engine"]["held_for_requests"]
            if held["requests"]:
                return name
    return None


async def stream_and(fault: Callable[[str], Any], url: str, body: dict[str, Any], role: str) -> str:
    """Stream; after 20 events `fault` befalls the node that plays `role` for this request; the whole text."""
    import orjson

    text, events = "", 0
    headers = {"X-Request-Id": f"doomed-{secrets.token_hex(4)}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body | {"stream": True}, headers=headers) as response,
    ):
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            events += 1
            if events == 20:
                async with session.get(f"{url}/debug/requests/{headers['X-Request-Id']}") as answer:
                    node = (await answer.json())["summary"]["nodes"][role]
                fault(node)
    return text
