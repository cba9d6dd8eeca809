"""A node changes its role when the load shifts from prompts to answers, and every stream keeps its tokens.

Nothing is timed: the load goes on until a node has changed, and then all streams end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lab.faults.client import Body, Load, Stream, each_once, random_bodies
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, settled, wait_until

SEED = 20261129
SEATS = 2
CLIENTS = 12
FIRST = {"prefill+decode-0": "prefill", "prefill+decode-1": "prefill", "prefill+decode-2": "decode"}
FLAGS = (
    "--served-model-name", "tiny", "--calibration-ms", "0", "--max-model-len", "2048", "--num-threads", "1",
    "--max-num-seqs", str(SEATS), "--role-change-hold-ms", "200",
)  # fmt: skip
WITHIN_S = 240.0
pytestmark = pytest.mark.timeout(4 * WITHIN_S)  # three waits, each as long as slow and busy cores may need


def bodies(prompt: int, tokens: int) -> list[Body]:
    return [body | {"model": "tiny"} for body in random_bodies(CLIENTS, prompt, tokens, SEED + prompt)]


def layout(url: str) -> dict[str, str]:
    """What each node takes new requests for, as the node at `url` knows it."""
    nodes = rest.get(f"{url}/live")["nodes"]
    return {
        node["node_id"]: "+".join(role for role in node["load"]["does"] if role != "store")
        for node in nodes
        if node.get("load")
    }


def decoders(cluster: LocalCluster) -> int:
    """Nodes that decode, as every node knows it; 0 while they disagree."""
    known = [layout(node.url) for node in cluster.nodes]
    return sum(does == "decode" for does in known[0].values()) if all(one == known[0] for one in known) else 0


def compare(found: Sequence[tuple[int, Stream]], calm: Sequence[Stream]) -> None:
    assert [stream.error for _, stream in found if stream.error] == []
    assert [stream.tokens for _, stream in found] == [calm[body].tokens for body, _ in found]


async def under_load(cluster: LocalCluster, given: Sequence[Body], name: str, until: int) -> list[tuple[int, Stream]]:
    """All clients send one request after the other until that number of nodes decodes."""
    async with Load([cluster.nodes[0].url], given, name, salted=True, insists=True) as load:
        due = f"{until} nodes decode"
        await asyncio.to_thread(wait_until, lambda: decoders(cluster) == until, due, WITHIN_S)
    return load.requests


def test_a_node_changes_its_role_when_the_load_shifts(start: Start, tiny_model):
    print(f"seed {SEED}")
    own = {name: ["--first-role", role] for name, role in FIRST.items()}
    prompts, answers = bodies(600, 1), bodies(40, 500)
    with start("prefill+decode=3", *tiny_model, *FLAGS, role_flags=own) as cluster:
        door = cluster.nodes[0].url
        wait_until(lambda: layout(door) == FIRST, "all know the roles at the start")
        calm = [asyncio.run(each_once(door, given, "calm", at_once=SEATS)) for given in (prompts, answers)]
        assert all(not one.error for streams in calm for one in streams)
        compare(asyncio.run(under_load(cluster, prompts, "prompts", 1)), calm[0])
        assert "decode" in layout(door).values(), "a stage keeps its last node"
        compare(asyncio.run(under_load(cluster, answers, "answers", 2)), calm[1])
        settled(cluster)
        wait_until(lambda: layout(door) == FIRST, "the node returns to its first role", WITHIN_S)
