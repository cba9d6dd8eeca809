"""An acceptor in front of workers that know nothing of each other: two nodes of ours, asked as if they were vLLM."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from engine.observe.explain import main as explain
from engine.observe.top import main as top
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, settled, timeline, wait_until

SEED = 20261124
LONG = 400  # tokens of an answer that is long enough to be interrupted
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


@dataclass
class Front:
    """An acceptor and its two workers."""

    acceptor: LocalCluster
    workers: list[LocalCluster]

    @property
    def url(self) -> str:
        return self.acceptor.nodes[0].url

    def names(self) -> list[str]:
        return [one.nodes[0].url.removeprefix("http://") for one in self.workers]

    def state(self) -> dict[str, dict[str, Any]]:
        """By worker."""
        return {one["name"]: one for one in rest.get(f"{self.url}/debug/state")["backends"]}


@pytest.fixture(scope="module")
def front(start: Start, tiny_model: list[str]) -> Iterator[Front]:
    with ExitStack() as stack:
        both = [*tiny_model, "--trust-request-chat-template"]
        flags = [*both, "--kv-events-config", json.dumps(EVENTS), "--dram-bytes", "0"]
        workers = [stack.enter_context(start("mixed=1", *flags)) for _ in range(2)]
        given: list[str] = []
        for one in workers:
            url = one.nodes[0].url
            events = rest.get(f"{url}/debug/state")["kv_events"]
            given += ["--backend", f"{url},events={events['endpoint']},replay={events['replay_endpoint']}"]
        yield Front(stack.enter_context(start("mixed=1", *both, *given)), workers)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def placed(front: Front, answer: dict[str, Any]) -> dict[str, Any]:
    return timeline(front.url, answer["id"])


def test_the_same_tokens_as_from_a_worker_itself(front):
    rng = random.Random(SEED)
    ids = prompt(rng, 90)
    alone = complete(front.workers[0].nodes[0].url, ids, 24, ignore_eos=True, return_token_ids=True)
    through = complete(front.url, ids, 24, ignore_eos=True, return_token_ids=True)
    assert through["choices"] == alone["choices"]
    message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    message["chat_template"] = "{% for one in messages %}{{ one.content }}{% endfor %}"
    chats = [rest.post(f"{url}/v1/chat/completions", message) for url in (front.workers[0].nodes[0].url, front.url)]
    assert chats[0]["choices"] == chats[1]["choices"] and chats[0]["usage"]["prompt_tokens"] >= 1


def test_a_prefix_is_known_wherever_it_was_computed(front):
    """Each worker computed one for another client: only its events tell."""
    rng = random.Random(SEED + 1)
    for holder in (0, 1):
        stem = prompt(rng, 400)
        complete(front.workers[holder].nodes[0].url, stem, 4)
        name, other = front.names()[holder], front.names()[1 - holder]
        blocks = rest.get(f"{front.workers[holder].nodes[0].url}/debug/state")["engine"]["blocks"]["named"]
        wait_until(lambda name=name, blocks=blocks: front.state()[name]["prefix_blocks"] == blocks, "events are here")
        found = placed(front, complete(front.url, stem + prompt(rng, 40), 4))
        rows = {row["node"]: row for row in found["decisions"][0]["considered"] if row["stage"] == "prefill"}
        assert (rows[name]["local_tokens"], rows[other]["local_tokens"]) == (400, 0)
        chosen = found["summary"]["nodes"]["prefill"]
        assert chosen == found["summary"]["nodes"]["decode"] == min(rows, key=lambda node: rows[node]["ttft_s"])
        assert found["summary"]["cached_tokens"] == rows[chosen]["local_tokens"]


def test_reports_show_the_workers(front, capsys):
    nodes = {one["node_id"]: one for one in rest.get(f"{front.url}/live")["nodes"]}
    for name in front.names():
        assert nodes[name]["status"] == "alive" and nodes[name]["roles"] == ["backend"]
        assert nodes[name]["blocks"]["total"] > 0
    for command, more in ((top, ["--once"]), (explain, [])):
        assert command([*more, "--url", front.url]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in front.names()), shown


def test_a_salt_separates_prefixes(front):
    rng = random.Random(SEED + 2)
    ids = prompt(rng, 200)
    complete(front.url, ids, 2, cache_salt="a")
    assert placed(front, complete(front.url, ids, 2, cache_salt="b"))["summary"]["cached_tokens"] == 0


def test_errors_of_a_worker_reach_the_client(front):
    for wrong in ({"bad_words": ["x"]}, {"echo": True, "logprobs": 1}, {"logprobs": 1}):
        with pytest.raises(rest.RestError):
            complete(front.url, [5] * 20, 4, **wrong)
    assert complete(front.url, [5] * 20, 4)["usage"]["completion_tokens"] == 4


async def test_a_client_that_hangs_up_frees_the_worker(front):
    async with aiohttp.ClientSession() as session:
        body = {"prompt": [7] * 50, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        async with session.post(f"{front.url}/v1/completions", json=body) as answer:
            await answer.content.readline()
    for one in front.workers:
        settled(one)
    wait_until(lambda: all(one["running"] == one["waiting"] == 0 for one in front.state().values()), "load is gone")


def test_a_worker_that_is_killed_is_a_pause(front):
    """The answer goes on with the same tokens on the other worker."""
    ids = prompt(random.Random(SEED + 3), 60)
    body = {"ignore_eos": True, "return_token_ids": True}
    expected = complete(front.workers[0].nodes[0].url, ids, LONG, **body)
    found: dict[str, Any] = {}
    asking = threading.Thread(target=lambda: found.update(complete(front.url, ids, LONG, **body)))
    asking.start()

    def running() -> list[str]:
        return [name for name, one in front.state().items() if one["running"]]

    wait_until(lambda: bool(running()), "the answer has begun")
    (name,) = running()
    front.workers[front.names().index(name)].nodes[0].process.kill()
    asking.join(60)
    assert found["choices"] == expected["choices"]
    assert len(placed(front, found)["decisions"]) == 2
    wait_until(lambda: bool(front.state()[name]["away"]) and not running(), "the worker is given up")
