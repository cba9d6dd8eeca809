"""KV in one byte per element everywhere: in the arenas, between two nodes, and in the store."""

from __future__ import annotations

from typing import Any

from cache.block import BlockGeometry
from tests.e2e.conftest import TINY, Start, complete, settled, timeline
from tests.e2e.test_start import run

PROMPT = list(range(100, 400))
GEOMETRY = BlockGeometry(TINY["num_hidden_layers"], TINY["num_key_value_heads"], 16, 16, "int8")
FOUND = (len(PROMPT) - 1) // GEOMETRY.block_size  # blocks of a prefix
FLAGS = ("--kv-cache-dtype", "int8", "--prefix-fetch", "always", "--transport")


def ask(url: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """The answer's text, and the details of its events by name."""
    answer = complete(url, PROMPT, 24, ignore_eos=True)
    events: dict[str, list[dict[str, Any]]] = {}
    for event in timeline(url, answer["id"])["events"]:
        events.setdefault(event["event"], []).append(event["detail"])
    return answer["choices"][0]["text"], events


def test_the_tokens_of_one_node_over_shared_memory_over_tcp_and_from_the_store(start: Start, tiny_model):
    """A node that joins without a wish adopts the type of KV; one that wants another is told."""
    with start("prefill=1,decode=1,store=1", *tiny_model, *FLAGS, "shm") as cluster:
        url = cluster["decode-0"].url
        computed, events = ask(url)
        (moved,) = events["kv_moved"]
        assert moved["transport"] == "shm" and "prefix_fetched" not in events
        assert moved["bytes"] == -(-len(PROMPT) // GEOMETRY.block_size) * GEOMETRY.block_bytes
        settled(cluster)

        cluster.restart("prefill-0", "--transport", "tcp")  # the prefix is in the store only now
        fetched, events = ask(url)
        assert [moved["transport"] for moved in events["kv_moved"]] == ["tcp"]
        assert [load["bytes"] for load in events["prefix_fetched"]] == [FOUND * GEOMETRY.block_bytes]
        settled(cluster)

        door = cluster["store-0"].url.removeprefix("http://")
        code, told = run(*tiny_model, "--role", "store", "--port", "0", "--join", door, "--kv-cache-dtype", "float32")
        assert code == 2 and "pass --kv-cache-dtype int8" in told.splitlines()[-1]

        cluster.kill("prefill-0")
        cluster.kill("decode-0")
        mixed = cluster.add("mixed", "--kv-cache-dtype", "auto", "--prefix-fetch", "never")
        alone, events = ask(mixed.url)
        assert not events.keys() & {"kv_moved", "prefix_fetched"}
        assert computed == fetched == alone
