"""KV in one byte per element in the pool: it moves encoded, and comes back."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Start, complete, settled, timeline

BLOCK = 16
ENCODED = 3 * 2 * 2 * (BLOCK * 16 + 4)  # of the tiny model: layers, K and V, heads, elements and their scale


@pytest.mark.parametrize("flags", [("--pool-dtype", "int8"), ("--pool-dtype", "fp8", "--prefetch", "best-effort")])
def test_a_prefix_comes_back_from_the_pool(start: Start, tiny_model, flags):
    """An arena of one context: the second prompt evicts the first, whose blocks come back from the DRAM share."""
    arena = ("--max-model-len", "640", "--kv-cache-bytes", str(640 * 3 * 2 * 2 * 16 * 4), "--prefix-fetch", "always")
    with start("mixed=1", *tiny_model, *arena, *flags, "--dram-bytes", "16M") as cluster:
        url = cluster.nodes[0].url
        prompt = list(range(1000, 1400))
        first = complete(url, prompt, 4)
        settled(cluster)
        complete(url, list(range(2000, 2630)), 1)  # the whole arena
        settled(cluster)
        again = complete(url, prompt, 4)
        (fetched,) = [e["detail"] for e in timeline(url, again["id"])["events"] if e["event"] == "prefix_fetched"]
        blocks = (len(prompt) - 1) // BLOCK
        assert (fetched["tiers"], fetched["bytes"]) == ({"dram": blocks}, blocks * ENCODED)
        assert len(again["choices"][0]["text"]) > 0 < len(first["choices"][0]["text"])
