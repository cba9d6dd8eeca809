"""A burst of one new prefix, through several acceptors at once, is computed on one node."""

from __future__ import annotations

import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, settled

SEED, CLIENTS, SHARED, OWN = 6, 4, 1500, 20
ONCE = SHARED + CLIENTS * (OWN + 2 * 16)
"""Tokens of a burst that is computed once: ends of prompts, and of their last whole blocks, are everybody's own."""

LEAD, MOST = 2, 12
"""Bursts go on until those computed once lead by so many over the others, which a machine that stops for as long as a
prefill takes can make of some. Without --prefix-intents hardly one in ten is computed once."""


def computed(cluster: LocalCluster) -> float:
    """Tokens that the prefill nodes have computed in all their steps, by their own metrics."""
    open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    texts = [open_url(f"{node.url}/metrics", timeout=10).read().decode() for node in cluster.nodes]
    sums = [line for text in texts for line in text.splitlines() if line.startswith("vllm:iteration_tokens_total_sum")]
    return sum(float(line.split()[-1]) for line in sums)


def test_a_burst_of_one_new_prefix_is_computed_once(start: Start, tiny_model):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    tokens: list[float] = []
    with start("prefill=2,decode=1,store=1", *tiny_model, "--max-num-batched-tokens", "512") as cluster:
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
