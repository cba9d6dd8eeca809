"""kill -9 of the node that a client talks to: the client goes on at another node, and every token comes once."""

from __future__ import annotations

import asyncio

import aiohttp

from scripts.faultbench.client import Stream, stream
from tests.e2e.conftest import Start, complete, model_of, settled


def test_death_of_the_acceptor_is_a_pause(start: Start, tiny_model):
    with start("prefill=1,decode=1,store=2", *tiny_model) as cluster:
        doors = [cluster["store-1"].url, cluster["store-0"].url]
        prompt, length = list(range(900, 1000)), 250
        body = {"model": model_of(doors[0]), "prompt": prompt, "max_tokens": length, "ignore_eos": True}
        body |= {"temperature": 1.0, "seed": 5}
        calm = complete(doors[0], prompt, length, ignore_eos=True, temperature=1.0, seed=5)["choices"][0]["text"]
        into = Stream()

        async def run() -> None:
            async with aiohttp.ClientSession() as session:
                work = asyncio.create_task(stream(session, doors, body, "lost", into))
                for _ in range(4000):
                    if len(into.tokens) >= 30:
                        break
                    await asyncio.sleep(0.005)
                cluster.kill("store-1")
                await work

        asyncio.run(run())
        assert into.error == "" and into.reconnects >= 1 and len(into.tokens) == length
        whole = complete(doors[1], prompt, length, ignore_eos=True, temperature=1.0, seed=5, return_token_ids=True)
        assert whole["choices"][0]["text"] == calm
        assert into.tokens == whole["choices"][0]["token_ids"]
        settled(cluster)
