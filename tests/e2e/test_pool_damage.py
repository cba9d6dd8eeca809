"""Blocks of the pool that are damaged in the memory of a store node are misses: clients get the right tokens."""

from __future__ import annotations

import pytest

from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import Node
from tests.e2e.conftest import Start, complete, settled, timeline
from tests.e2e.test_switches import BLOCK, CONTEXT, SMALL, zero_pooled_blocks

PROMPTS = [[1000 * n + i for i in range(20 * BLOCK + 1)] for n in range(1, 5)]
FILL = [[9000 + 1000 * n + i for i in range(CONTEXT - 8)] for n in range(2)]
NO_SHARE = ["--dram-bytes", "0"]
SHARES = {"prefill": NO_SHARE, "decode": NO_SHARE, "mixed": NO_SHARE, "store": ["--dram-bytes", "16M"]}


def answer(url: str, prompt: list[int]) -> tuple[int, str, int]:
    """(tokens of the prompt that were not computed, text, failed attempts)"""
    body = complete(url, prompt, 8, ignore_eos=True)
    failed = sum(event["event"] == "attempt_failed" for event in timeline(url, body["id"])["events"])
    return body["usage"]["prompt_tokens_details"]["cached_tokens"], body["choices"][0]["text"], failed


def corrupt(nodes: list[Node]) -> float:
    """Damaged blocks, counted by the homes."""
    states = [rest.get(f"{node.url}/debug/state")["store"] for node in nodes]
    return sum(state["dram"]["corrupt"] for state in states if state)


@pytest.mark.parametrize(
    ("engines", "flags"),
    [("prefill=1,decode=1", []), ("prefill=1,decode=1", ["--pool-dtype", "int8"]), ("mixed=1", [])],
    ids=["shm and tcp", "encoded", "mixed"],
)
def test_damaged_blocks_are_computed(start: Start, tiny_model: list[str], engines: str, flags: list[str]):
    flags = [*tiny_model, *SMALL, "--prefix-fetch", "always", *flags]
    with start(f"{engines},store=1", *flags, role_flags=SHARES) as cluster:
        url = cluster.nodes[0].url
        right = [answer(url, prompt) for prompt in PROMPTS]
        assert {(cached, failed) for cached, _, failed in right} == {(0, 0)}
        compare(cluster, url, right)
        if engines != "mixed=1" and not flags:
            compare(cluster, cluster.restart("prefill-0", "--transport", "tcp").url, right)


def compare(cluster: LocalCluster, url: str, right: list[tuple[int, str, int]]) -> None:
    """Damage what the pool has of the prompts, and ask for all of them again."""
    for prompt in FILL:  # the arenas forget the prompts
        answer(url, prompt)
    settled(cluster)
    before = corrupt(cluster.nodes)
    zero_pooled_blocks(cluster["store-0"])
    again = [answer(url, prompt) for prompt in PROMPTS]
    assert [one[:2] for one in again] == [one[:2] for one in right]
    assert max(failed for _, _, failed in again) <= 1, "the attempt after a damaged prefix computes the prompt"
    settled(cluster)
    assert corrupt(cluster.nodes) > before
