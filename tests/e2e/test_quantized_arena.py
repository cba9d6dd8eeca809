"""KV in one byte per element everywhere: in the arenas, between two nodes, and in the pool."""

from __future__ import annotations

from typing import Any

import torch

from attention.choice.choose import choose
from attention.codes import pool_in
from cache.block import BlockGeometry
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.model.decoder import Model
from engine.step.runner import Runner
from tests.e2e.conftest import TINY, Start, complete, settled, timeline
from tests.engine.model.test_model import greedy

FIRST, SECOND = list(range(100, 400)), list(range(3000, 3290))
GEOMETRY = BlockGeometry(TINY["num_hidden_layers"], TINY["num_key_value_heads"], 16, 16, "int8")
FLAGS = ("--kv-cache-dtype", "int8", "--prefix-fetch", "always")


def one_node(folder: str, prompt: list[int]) -> list[int]:
    """What a node computes that prefills and decodes, without the node around it."""
    source = describe(folder, "dummy")
    model = Model(source.config, weights.load(source, torch.float32), choose("auto", "cpu", 16, "int8"))
    memory = torch.zeros(24 * GEOMETRY.block_bytes, dtype=torch.uint8)
    runner = Runner(model, pool_in(memory, GEOMETRY.shape, GEOMETRY.dtype), GEOMETRY.block_size)
    return greedy(runner, prompt, 24, [len(prompt)], list(range(24)))


def ask(url: str, prompt: list[int]) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """The answer's text, and the details of its events by name."""
    answer = complete(url, prompt, 24, ignore_eos=True)
    events: dict[str, list[dict[str, Any]]] = {}
    for event in timeline(url, answer["id"])["events"]:
        events.setdefault(event["event"], []).append(event["detail"])
    return answer["choices"][0]["text"], events


def check_push(moved: dict[str, Any], transport: str, prompt: list[int]) -> None:
    """Codes and scales of the whole prompt, and nothing else."""
    blocks = -(-len(prompt) // GEOMETRY.block_size)
    assert (moved["transport"], moved["bytes"]) == (transport, blocks * GEOMETRY.block_bytes)


def test_the_tokens_of_one_node_over_shared_memory_and_tcp_and_from_the_pool(
    start: Start, tiny_model, embedded_tokenizer
):
    first, second = (
        embedded_tokenizer.decode(one_node(tiny_model[1], prompt), skip_special_tokens=True)
        for prompt in (FIRST, SECOND)
    )
    pool = {"decode": ["--dram-bytes", "64M"]}
    with start("prefill=1,decode=1", *tiny_model, *FLAGS, role_flags=pool) as cluster:
        url = cluster["decode-0"].url
        text, events = ask(url, FIRST)
        assert text == first and "prefix_fetched" not in events
        check_push(*events["kv_moved"], "shm", FIRST)
        settled(cluster)

        cluster.restart("prefill-0", "--transport", "tcp")  # the prefix is in the pool only now
        text, events = ask(url, FIRST)
        assert text == first
        (fetched,) = events["prefix_fetched"]
        assert fetched["bytes"] == (len(FIRST) - 1) // GEOMETRY.block_size * GEOMETRY.block_bytes
        text, events = ask(url, SECOND)
        assert text == second
        check_push(*events["kv_moved"], "tcp", SECOND)
        settled(cluster)
