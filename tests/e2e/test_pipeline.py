"""Long prompts on several prefill nodes (--prefill-parallel cpp): the same tokens as one node, whatever happens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from lab.launch import rest
from tests.e2e.conftest import Start, complete, settled, timeline

GROUPS = (
    "--prefill-parallel",
    "cpp",
    "--cpp-min-tokens",
    "400",
    "--max-num-batched-tokens",
    "128",
    "--block-size",
    "32",
)
EVERY = ("--calibration-ms", "0", "--num-threads", "1", "--kv-cache-bytes", "16M", "--prefix-fetch", "always")
LONG = 1500


def prompt(number: int) -> list[int]:
    return [5 + number + i * 13 % 40000 for i in range(LONG)]


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def events(url: str, answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in timeline(url, answer["id"])["events"] if event["event"] == name]


@pytest.fixture(scope="module")
def right(start: Start, tiny_model: list[str]) -> list[str]:
    """The answers of one node to some prompts."""
    with start("mixed=1", *tiny_model, *EVERY) as cluster:
        url = cluster.nodes[0].url
        longer = prompt(0) + prompt(1)[:450]
        return [text(complete(url, ids, 8)) for ids in [*map(prompt, range(4)), longer]]


def stages_of(url: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What the stages of all its pipelines did, in the order of their layers."""
    return sorted((one["detail"] for one in events(url, answer, "stage")), key=lambda stage: stage["index"])


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.heavy)])
def test_a_group_gives_the_tokens_of_one_node(start: Start, tiny_model, right, nodes):
    """Every stage computes its own layers and sends their KV itself; the decode node publishes the whole blocks, so a
    longer prompt finds them: each stage loads all layers of the known part, and computes its own of the rest."""
    with start(f"prefill={nodes},decode=1,store=1", *tiny_model, *EVERY, *GROUPS) as cluster:
        url = cluster["decode-0"].url
        answer = complete(url, prompt(0), 8)
        assert text(answer) == right[0]
        stages = stages_of(url, answer)
        assert [stage["index"] for stage in stages] == list(range(nodes))
        layers = [stage["layers"] for stage in stages]
        assert layers[0][0] == 0 and layers[-1][1] == 3 and all(a[1] == b[0] for a, b in pairwise(layers))
        assert {one["node"] for one in events(url, answer, "kv_moved")} == set(stages[0]["nodes"])
        assert stages[0]["hidden_bytes"] == LONG * 64 * 4 and stages[-1]["hidden_bytes"] == 0
        assert sum(stage["chunks"] for stage in stages) >= nodes * (LONG // 128)
        settled(cluster)
        assert rest.get(f"{cluster['store-0'].url}/debug/state")["store"]["dram"]["blocks"] > 0
        longer = prompt(0) + prompt(1)[:450]
        again = complete(url, longer, 8)
        assert text(again) == right[4]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == LONG // 32 * 32
        assert [stage["prefix_tokens"] for stage in stages_of(url, again)] == nodes * [LONG // 32 * 32]
        settled(cluster)
        short = complete(url, prompt(2)[:100], 8)
        assert not events(url, short, "stage")
