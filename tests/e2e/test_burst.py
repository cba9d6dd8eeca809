"""A burst of one new prefix, through several acceptors at once, is computed on one node."""

from __future__ import annotations

import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, settled

SEED, CLIENTS, BURSTS, SHARED = 6, 4, 4, 1500


def computed(cluster: LocalCluster) -> float:
    """Tokens that the prefill nodes have computed in all their steps, by their own metrics."""
    open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    texts = [open_url(f"{node.url}/metrics", timeout=10).read().decode() for node in cluster.nodes]
    sums = [line for text in texts for line in text.splitlines() if line.startswith("vllm:iteration_tokens_total_sum")]
    return sum(float(line.split()[-1]) for line in sums)


@pytest.mark.parametrize("intents", [True])
def test_a_burst_of_one_new_prefix_is_computed_once(start: Start, tiny_model, intents: bool):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    flags = [] if intents else ["--no-prefix-intents"]
    with start("prefill=2,decode=1,store=1", *tiny_model, "--max-num-batched-tokens", "512", *flags) as cluster:
        urls = [node.url for node in cluster.nodes]
        for url in urls:  # so that everybody knows everybody
            complete(url, [rng.randrange(3, 40000) for _ in range(40)], 2)
        with ThreadPoolExecutor(CLIENTS) as clients:
            for _ in range(BURSTS):
                shared = [rng.randrange(3, 40000) for _ in range(SHARED)]
                prompts = [[*shared, *(rng.randrange(3, 40000) for _ in range(20))] for _ in range(CLIENTS)]
                before = computed(cluster)
                list(clients.map(lambda i: complete(urls[i % len(urls)], prompts[i], 1), range(CLIENTS)))  # noqa: B023
                tokens = computed(cluster) - before
                print(f"computed {tokens:.0f} tokens for {CLIENTS} prompts of {SHARED} + 20")
                assert tokens < SHARED + CLIENTS * (20 + 16 + 16), "somebody computed the shared part again"
        settled(cluster)
