"""Requests whose KV exceeds the arena (--beyond-memory on): the tokens of a large arena, whatever happens."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest

from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import Node
from tests.e2e.conftest import Start, complete, model_of, settled, timeline, wait_until

TOKEN_BYTES = 768
ARENA_TOKENS = 384
EVERY = ("--calibration-ms", "300", "--num-threads", "1", "--max-num-batched-tokens", "64", "--prefix-fetch", "always")
BEYOND = (
    "--kv-cache-bytes",
    str(ARENA_TOKENS * TOKEN_BYTES),
    "--dram-bytes",
    "4M",
    "--beyond-memory",
    "on",
    "--slo",
    "standard:tbt=60",
)
LONG = 4 * ARENA_TOKENS


def prompt(number: int, tokens: int = LONG) -> list[int]:
    return [5 + number + i * 13 % 40000 for i in range(tokens)]


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def event(url: str, answer: dict[str, Any], name: str) -> dict[str, Any] | None:
    found = [one["detail"] for one in timeline(url, answer["id"])["events"] if one["event"] == name]
    return found[-1] if found else None


@pytest.fixture(scope="module")
def right(start: Start, tiny_model: list[str]) -> dict[str, Any]:
    """The answers of a node with a large arena."""
    with start("mixed=1", *tiny_model, *EVERY, "--kv-cache-bytes", "16M") as cluster:
        url = cluster.nodes[0].url
        return {
            "long": [text(complete(url, prompt(number), 24)) for number in range(3)],
            "longer": text(complete(url, prompt(0) + prompt(7, 100), 24)),
            "short": [text(complete(url, prompt(number, 100), 24)) for number in range(3)],
        }


def idle(cluster: LocalCluster) -> None:
    """Nothing is held in any arena, nor in the DRAM of any share."""
    settled(cluster)
    for node in cluster.nodes:
        if node.alive:
            wait_until(lambda node=node: not dram(node)["held"], f"{node.name} holds {dram(node)}")


def dram(node: Node) -> dict[str, Any]:
    share = rest.get(f"{node.url}/debug/state")["store"]
    return {"held": 0} if share is None else dict(share["dram"])


def test_four_times_the_arena_beside_other_requests(start: Start, tiny_model, right):
    """One node: the same greedy tokens; a prompt that the tier knows is not computed again."""
    with start("mixed=1", *tiny_model, *EVERY, *BEYOND) as cluster:
        url = cluster.nodes[0].url
        with ThreadPoolExecutor(6) as clients:
            asked = [clients.submit(complete, url, prompt(number), 24) for number in range(3)]
            short = [clients.submit(complete, url, prompt(number, 100), 24) for number in range(3)]
            assert [text(one.result()) for one in short] == right["short"]
            assert [text(one.result()) for one in asked] == right["long"]
        for one in asked:
            found = event(url, one.result(), "beyond_memory")
            assert found is not None and found["near_bytes"] > 3 * ARENA_TOKENS * TOKEN_BYTES and found["token_s"] > 0
            assert event(url, one.result(), "placed")["beyond_memory"] is True
        assert event(url, short[0].result(), "beyond_memory") is None
        idle(cluster)
        again = complete(url, prompt(0) + prompt(7, 100), 24)
        assert text(again) == right["longer"]
        found = event(url, again, "beyond_memory")
        assert found["known_tokens"] > LONG // 2 and again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 700
        state = rest.get(f"{url}/debug/state")["engine"]["beyond_memory"]
        assert state["done"]["requests"] == 4 and state["done"]["dram_bytes"] > 0 and state["dram_bytes_per_s"] > 0
        idle(cluster)


def test_blocks_on_ssd(start: Start, tiny_model, right, tmp_path_factory):
    """DRAM for a fifth of the request, an SSD tier for the rest; a second life of the node finds them there."""
    ssd = ("--ssd-path", str(tmp_path_factory.mktemp("ssd")), "--ssd-bytes", "16M", "--dram-bytes", "300k")
    with start("mixed=1", *tiny_model, *EVERY, *BEYOND, *ssd) as cluster:
        for number in range(2):
            url = cluster.nodes[0].url
            answer = complete(url, prompt(0), 24)
            assert text(answer) == right["long"][0]
            found = event(url, answer, "beyond_memory")
            assert found["far_bytes"] > found["near_bytes"] > 0
            assert found["known_tokens"] > LONG // 2 if number else found["known_tokens"] == 0
            idle(cluster)
            state = rest.get(f"{url}/debug/state")
            assert state["store"]["ssd"]["held"] == 0 and state["engine"]["beyond_memory"]["bytes_read"] > 0
            if not number:
                cluster.kill("mixed-0", signal.SIGKILL)
                cluster.restart("mixed-0")


def test_what_no_tier_holds_and_no_objective_bears_is_refused_with_the_arithmetic(start: Start, tiny_model):
    small = ("--dram-bytes", "1M")
    with start(
        "mixed=1", *tiny_model, *EVERY, *BEYOND, *small, "--slo", "standard:tbt=0.000001;batch:tbt=60"
    ) as cluster:
        url = cluster.nodes[0].url
        config = rest.get(f"{url}/debug/state")["config"]
        assert ARENA_TOKENS < config["max_model_len"] < LONG, "as far as both memories go"
        with pytest.raises(rest.RestError, match="maximum context length"):
            complete(url, prompt(0), 8)
        with pytest.raises(rest.RestError, match=r"each token would read .* MB .*1e-06 s \(--slo\)"):
            complete(url, prompt(0, 800), 8)
        answer = complete(url, prompt(0, 800), 8, service_class="batch")
        assert event(url, answer, "beyond_memory") is not None
        idle(cluster)
    with start("mixed=1,store=1", *tiny_model, *EVERY, *BEYOND, *small) as cluster:  # a store accepts any length
        with pytest.raises(rest.RestError, match=r"need \d+ blocks of 12288 bytes .* --dram-bytes") as error:
            complete(cluster["store-0"].url, prompt(0), 8)
        assert "mixed-0" in str(error.value)
        idle(cluster)


def test_a_decode_node_does_it_all(start: Start, tiny_model, right):
    """Short prompts go from the prefill to the decode node; one beyond memory stays on the decode node."""
    with start("prefill=1,decode=1", *tiny_model, *EVERY, *BEYOND) as cluster:
        url = cluster["prefill-0"].url
        answer = complete(url, prompt(0), 24)
        assert text(answer) == right["long"][0]
        placed = event(url, answer, "placed")
        assert (placed["prefill"], placed["decode"]) == ("decode-0", "decode-0")
        short = complete(url, prompt(1, 100), 24)
        assert text(short) == right["short"][1] and event(url, short, "placed")["prefill"] == "prefill-0"
        idle(cluster)


def begun(cluster: LocalCluster, answer: Future[Any]) -> Node | None:
    """The node that computes the request; None if the answer came first."""
    while not answer.done():
        for node in cluster.nodes:
            if node.alive and node.name.startswith("mixed") and dram(node)["held"] > 60:
                return node
    return None


def test_a_node_that_dies_is_a_pause_and_a_client_that_goes_leaves_nothing(start: Start, tiny_model, right):
    with start("mixed=2,store=1", *tiny_model, *EVERY, *BEYOND) as cluster:
        url = cluster["store-0"].url
        with pytest.raises(TimeoutError):
            asyncio.run(hang_up(cluster, url, prompt(2)))
        idle(cluster)
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(complete, url, prompt(1), 24)
            victim = begun(cluster, answer)
            if victim is not None:
                cluster.kill(victim.name, signal.SIGKILL)
            assert text(answer.result()) == right["long"][1]
        idle(cluster)


async def hang_up(cluster: LocalCluster, url: str, ids: list[int]) -> None:
    """Ask, and close the connection when some node has blocks of the request in its tier."""
    body = {"model": model_of(url), "prompt": ids, "max_tokens": 400, "temperature": 0}
    async with aiohttp.ClientSession() as session, asyncio.timeout(60) as patience:
        asked = asyncio.ensure_future(session.post(f"{url}/v1/completions", json=body))
        mixed = [node for node in cluster.nodes if node.name.startswith("mixed")]
        while not asked.done():
            if max([(await asyncio.to_thread(dram, node))["held"] for node in mixed]) > 60:
                break
        patience.reschedule(asyncio.get_running_loop().time())
        await asked
        await asyncio.sleep(60)
