"""A burst of one new prefix, through several acceptors at once, is computed on one node."""

from __future__ import annotations

import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from scripts.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, settled

SEED, CLIENTS, BURSTS, SHARED, OWN = 6, 4, 4, 1500, 20
ONCE = SHARED + CLIENTS * (OWN + 2 * 16)
"""Tokens of a burst that is computed once: ends of prompts, and of their last whole blocks, are everybody's own."""


def computed(cluster: LocalCluster) -> float:
    """Tokens that the prefill nodes have computed in all their steps, by their own metrics."""
    open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    texts = [open_url(f"{node.url}/metrics", timeout=10).read().decode() for node in cluster.nodes]
    sums = [line for text in texts for line in text.splitlines() if line.startswith("vllm:iteration_tokens_total_sum")]
    return sum(float(line.split()[-1]) for line in sums)


def test_a_burst_of_one_new_prefix_is_computed_once(start: Start, tiny_model):
    """Without --prefix-intents both prefill nodes compute nearly every burst. A machine that stops for as long as a
    prefill takes can make one burst look like two, so not every one has to be computed once."""
    print(f"seed {SEED}")
    rng, tokens = random.Random(SEED), []
    with start("prefill=2,decode=1,store=1", *tiny_model, "--max-num-batched-tokens", "512") as cluster:
        urls = [node.url for node in cluster.nodes]
        for url in urls:  # so that everybody knows everybody
            complete(url, [rng.randrange(3, 40000) for _ in range(40)], 2)
        with ThreadPoolExecutor(CLIENTS) as clients:
            for _ in range(BURSTS):
                shared = [rng.randrange(3, 40000) for _ in range(SHARED)]
                prompts = [[*shared, *(rng.randrange(3, 40000) for _ in range(OWN))] for _ in range(CLIENTS)]
                before = computed(cluster)
                list(clients.map(lambda i: complete(urls[i % len(urls)], prompts[i], 1), range(CLIENTS)))  # noqa: B023
                tokens.append(computed(cluster) - before)
        settled(cluster)
    print(f"computed for {CLIENTS} prompts of {SHARED} + {OWN} tokens each: {tokens}")
    assert sum(count < ONCE for count in tokens) >= BURSTS / 2, tokens
    assert sum(tokens) < 1.75 * BURSTS * SHARED, tokens
