"""Bursts: one new prefix through several acceptors at once is computed on one node; of more requests than fit, as many
are served as fit."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest

from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import TINY, Start, complete, settled

SEED, CLIENTS, SHARED, OWN = 6, 4, 1500, 20
ONCE = SHARED + CLIENTS * (OWN + 2 * 16)
"""Tokens of a burst that is computed once: ends of prompts, and of their last whole blocks, are everybody's own."""

LEAD, MOST = 2, 12
"""Bursts go on until those computed once lead by so many over the others, which a machine that stops for as long as a
prefill takes can make of some. Without --prefix-intents hardly one in ten is computed once."""


WAITING = 16
OFFERED = (40, 160)
GOSSIPED_S = 1.0
"""Within it every node knows the load of the others."""


LAYERS = 16
"""Of the model. A prefill shorter than WORTH_S (sched/gossip/intents.py) is not worth a claim, and a fast machine
computes the prompt in less than that with the three of the tiny model."""


@pytest.fixture(scope="module")
def cluster(start: Start, tiny_model: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    tiny = Path(tiny_model[tiny_model.index("--model") + 1])
    deeper = tmp_path_factory.mktemp("deeper") / "model"
    shutil.copytree(tiny, deeper)
    (deeper / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": LAYERS}))
    flags = ("--max-num-batched-tokens", "512", "--max-waiting-requests", str(WAITING), "--kv-cache-bytes", "256M")
    with start("prefill=2,decode=1,store=1", *tiny_model, *flags, "--model", str(deeper)) as running:
        yield running


def computed(cluster: LocalCluster) -> float:
    """Tokens that the prefill nodes have computed in all their steps, by their own metrics."""
    open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    texts = [open_url(f"{node.url}/metrics", timeout=10).read().decode() for node in cluster.nodes]
    sums = [line for text in texts for line in text.splitlines() if line.startswith("vllm:iteration_tokens_total_sum")]
    return sum(float(line.split()[-1]) for line in sums)


def test_a_burst_of_one_new_prefix_is_computed_once(cluster: LocalCluster):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    tokens: list[float] = []
    urls = [node.url for node in cluster.nodes]
    for url in urls:  # so that everybody knows everybody
        complete(url, [rng.randrange(3, 40000) for _ in range(40)], 2)
    with ThreadPoolExecutor(CLIENTS) as clients:
        while lead(tokens) < LEAD and len(tokens) < MOST:
            shared = [rng.randrange(3, 40000) for _ in range(SHARED)]
            prompts = [[*shared, *(rng.randrange(3, 40000) for _ in range(OWN))] for _ in range(CLIENTS)]
            before = computed(cluster)
            list(clients.map(lambda i: complete(urls[i % len(urls)], prompts[i], 1), range(CLIENTS)))  # noqa: B023
            tokens.append(computed(cluster) - before)
    settled(cluster)
    print(f"computed for {CLIENTS} prompts of {SHARED} + {OWN} tokens each: {tokens}")
    assert lead(tokens) >= LEAD, tokens


def lead(tokens: list[float]) -> int:
    """Of the bursts computed once over the others."""
    return sum(1 if count < ONCE else -1 for count in tokens)


def test_of_more_requests_than_fit_as_many_are_served_as_fit(cluster: LocalCluster):
    """The decode node's queue is the shortest. A long prompt whose client hangs up takes no place of the next burst."""
    url = f"{cluster.nodes[0].url}/v1/completions"

    async def burst(offered: int) -> Counter[int]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask(number: int) -> int:
                body = {"prompt": [3 + number % 900] * 40, "max_tokens": 4, "ignore_eos": True}
                async with session.post(url, json=body) as response:
                    text = await response.text()
                    if response.status != 200:
                        refusals[text[:200]] += 1
                    return response.status

            return Counter(await asyncio.gather(*(ask(number) for number in range(offered))))

    async def hang_up() -> None:
        long = {"prompt": [5] * 1900, "max_tokens": 4, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.post(url, json=long))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    for offered in OFFERED:
        settled(cluster)
        time.sleep(GOSSIPED_S)  # a node that hears late of the end of the last burst refuses some of this one
        asyncio.run(hang_up())
        refusals: Counter[str] = Counter()
        statuses = asyncio.run(burst(offered))
        print(f"{offered} at once: {dict(statuses)}; refused: {dict(refusals)}")
        assert set(statuses) <= {200, 429} and statuses[200] >= WAITING
    settled(cluster)


def test_a_request_with_more_prompts_than_fit_is_served_whole(cluster: LocalCluster):
    """The gate of its acceptor has WAITING + 1 places, and one decode node takes them all."""
    settled(cluster)
    prompts = [[3 + number] * 40 for number in range(OFFERED[1])]
    answer = complete(cluster.nodes[0].url, prompts, 4, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    assert answer["usage"]["completion_tokens"] == 4 * len(prompts)
    settled(cluster)
