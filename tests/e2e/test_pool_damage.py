"""Blocks of the pool that are damaged in the memory of a store node are misses: clients get the right tokens."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from engine.node.local_store import DRAM_REGION
from lab.launch import rest
from lab.launch.nodes import Node
from tests.e2e.conftest import Start, complete, settled

BLOCK, BLOCK_BYTES = 16, 12288
"""Tokens and bytes of a block of the tiny model."""

CONTEXT = 640
PROMPTS = [[1000 * n + i for i in range(20 * BLOCK + 1)] for n in range(1, 5)]
FILL = [[9000 + 1000 * n + i for i in range(CONTEXT - 8)] for n in range(2)]
SMALL = ("--max-model-len", str(CONTEXT), "--kv-cache-bytes", str(CONTEXT // BLOCK * BLOCK_BYTES))
SHARES = {"prefill": ["--dram-bytes", "0"], "decode": ["--dram-bytes", "0"], "store": ["--dram-bytes", "16M"]}


def zero_pooled_blocks(node: Node) -> None:
    """Overwrite the blocks in the DRAM of the node's share, without its knowledge."""
    files = Path(f"/proc/{node.pid}/fd").iterdir()
    (path,) = [file for file in files if str(file.readlink()).startswith(f"/memfd:{DRAM_REGION} ")]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        assert memory.find(b"\1") >= 0, "the share is empty"
        memory[:] = bytes(len(memory))


def answer(url: str, prompt: list[int]) -> tuple[int, str]:
    """(tokens of the prompt that were not computed, text)"""
    body = complete(url, prompt, 8, ignore_eos=True)
    return body["usage"]["prompt_tokens_details"]["cached_tokens"], body["choices"][0]["text"]


def corrupt(nodes: list[Node]) -> float:
    """Damaged blocks, counted by the homes."""
    states = [rest.get(f"{node.url}/debug/state")["store"] for node in nodes]
    return sum(state["dram"]["corrupt"] for state in states if state)


@pytest.mark.parametrize("flags", [[], ["--transport", "tcp"], ["--pool-dtype", "int8"]], ids=["shm", "tcp", "encoded"])
def test_damaged_blocks_are_computed(start: Start, tiny_model: list[str], flags: list[str]):
    flags = [*tiny_model, *SMALL, "--prefix-fetch", "always", *flags]
    with start("prefill=1,decode=1,store=1", *flags, role_flags=SHARES) as cluster:
        url, store = cluster["prefill-0"].url, cluster["store-0"]
        right = [answer(url, prompt) for prompt in PROMPTS]
        assert [cached for cached, _ in right] == [0] * len(PROMPTS)
        for prompt in FILL:  # the arena of the prefill node forgets the prompts
            answer(url, prompt)
        settled(cluster)
        zero_pooled_blocks(store)
        assert [answer(url, prompt) for prompt in PROMPTS] == right
        settled(cluster)
        assert corrupt(cluster.nodes) > 0
