"""What else the pooled store carries: KV in one byte per element, and the weights of the model."""

from __future__ import annotations

import time
from pathlib import Path

from cache.store.client import Store
from lab.launch import rest
from tests.e2e.conftest import Start, complete, settled, timeline

BLOCK = 16
ENCODED = 3 * 2 * 2 * (BLOCK * 16 + 4)  # of the tiny model: layers, K and V, heads, elements and their scale
ARENA = 640 * 3 * 2 * 2 * 16 * 4  # of one context
PROMPT = list(range(1000, 1400))


def published(url: str, within_s: float = 30.0) -> str:
    """Name of the weights in the store, once they are all there."""
    name = f"objects/weights/{rest.get(url + '/cluster')['fingerprint']}/float32"
    deadline = time.monotonic() + within_s
    with Store(url.removeprefix("http://")) as store:
        while not store.exists(name):
            assert time.monotonic() < deadline, "the weights were not published"
            time.sleep(0.1)
    return name


def test_encoded_prefixes_and_weights(start: Start, tiny_model, tmp_path: Path):
    """A prefix leaves the arena and comes back encoded. Then the only node with the weights on disk goes, and one with
    an empty model directory starts from what the store node holds."""
    small = (
        "--attention-backend",
        "torch",
        "--max-model-len",
        "640",
        "--kv-cache-bytes",
        str(ARENA),
        "--prefix-fetch",
        "always",
    )
    pool = ("--pool-dtype", "int8", "--dram-bytes", "64M", "--replicas", "2", "--weights-from-store")
    with start("store=1,mixed=1", *tiny_model, *small, *pool) as cluster:
        first = cluster["mixed-0"]
        answer = complete(first.url, PROMPT, 8)
        settled(cluster)
        complete(first.url, list(range(2000, 2630)), 1)  # the whole arena
        settled(cluster)
        again = complete(first.url, PROMPT, 8)
        (fetched,) = [e["detail"] for e in timeline(first.url, again["id"])["events"] if e["event"] == "prefix_fetched"]
        blocks = (len(PROMPT) - 1) // BLOCK
        assert (fetched["tiers"], fetched["bytes"]) == ({"dram": blocks}, blocks * ENCODED)
        assert len(fetched["intervals"]) == 3, "layer by layer"

        published(first.url)
        model = Path(tiny_model[1])
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_bytes((model / name).read_bytes())
        cluster.kill("mixed-0")
        bare = cluster.add("mixed", "--model", str(tmp_path), "--load-format", "auto", "--prefix-fetch", "never")
        assert any("loading the weights from the pooled store" in line for line in bare.last_lines(200))
        assert complete(bare.url, PROMPT, 8)["choices"][0]["text"] == answer["choices"][0]["text"]
