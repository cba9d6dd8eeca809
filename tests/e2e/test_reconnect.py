"""kill -9 of the node that a client talks to: the client goes on at another node, and every token comes once."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from lab.faults.checks import form
from lab.faults.client import Stream, stream
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, model_of, settled

TRIES, LENGTH = 4, 250


def test_death_of_the_acceptor_is_a_pause(start: Start, tiny_model):
    """A client that the machine lets wait may have the whole answer when the node dies: then once more."""
    with start("prefill=1,decode=1,store=2", *tiny_model) as cluster:
        doors = [cluster["store-1"].url, cluster["store-0"].url]
        prompt, sampled = list(range(900, 1000)), {"ignore_eos": True, "temperature": 1.0, "seed": 5}
        body = {"model": model_of(doors[0]), "prompt": prompt, "max_tokens": LENGTH} | sampled
        calm = complete(doors[0], prompt, LENGTH, **sampled, return_token_ids=True)["choices"][0]
        for number in range(TRIES):
            into = asyncio.run(cut_short(cluster, doors, body, f"lost-{number}"))
            assert into.error == "" and into.tokens == calm["token_ids"]
            if into.reconnects:
                break
            cluster.restart("store-1")
            form(cluster)
            doors[0] = cluster["store-1"].url
        assert into.reconnects, "the answers were always whole before the node was dead"
        whole = complete(doors[1], prompt, LENGTH, **sampled)
        assert whole["choices"][0]["text"] == calm["text"]
        settled(cluster)


async def cut_short(cluster: LocalCluster, doors: list[str], body: dict[str, Any], request_id: str) -> Stream:
    """A stream whose node is killed after some tokens."""
    into = Stream()
    async with aiohttp.ClientSession() as session:
        work = asyncio.create_task(stream(session, doors, body, request_id, into))
        while len(into.tokens) < 30 and not work.done():  # noqa: ASYNC110 - a state, no event
            await asyncio.sleep(0.005)
        cluster.kill("store-1")
        await work
    return into
