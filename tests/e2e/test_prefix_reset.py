"""POST /reset_prefix_cache on one node: no node of the cluster finds the prompt any more; its tokens stay the same."""

from __future__ import annotations

import random
from typing import Any

from lab.launch import rest
from tests.e2e.conftest import Start, complete, settled, timeline

SEED = 20261123


def test_after_a_reset_the_cluster_is_cold(start: Start, tiny_model: list[str]) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    prompt = [rng.randrange(1000, 40_000) for _ in range(200)]
    with start("prefill=1,decode=1,store=1", *tiny_model, "--prefix-fetch", "always") as cluster:
        url = cluster["decode-0"].url

        def ask() -> tuple[list[int], int]:
            """Tokens of the answer, and prompt tokens that were found."""
            answer = complete(url, prompt, 8, ignore_eos=True, return_token_ids=True)
            cached: Any = timeline(url, answer["id"])["summary"]["cached_tokens"]
            return answer["choices"][0]["token_ids"], cached

        cold, found = ask()
        assert found == 0
        settled(cluster)
        warm, found = ask()
        assert found > 150 and warm == cold
        settled(cluster)

        told = rest.post(f"{cluster['store-0'].url}/reset_prefix_cache", {})["nodes"]
        assert set(told) == {"prefill-0", "decode-0", "store-0"}
        assert all(report["error"] is None for report in told.values())
        assert told["prefill-0"]["arena_blocks"] > 0 < told["decode-0"]["arena_blocks"]
        assert sum(report["pooled_blocks"] for report in told.values()) > 0
        states = settled(cluster)
        for name in ("prefill-0", "decode-0"):
            blocks = states[name]["engine"]["blocks"]
            assert blocks["named"] == 0 and blocks["free"] == blocks["total"]

        again, found = ask()
        assert found == 0 and again == cold
        settled(cluster)
