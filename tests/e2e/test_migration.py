"""Running requests move to another decode node: no token is lost or doubled, and the node that leaves does not wait."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence

import pytest

from lab.faults.client import Body, Load, Stream, each_once, random_bodies
from lab.faults.migrations import moves_of
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import Node
from tests.e2e.conftest import Start, wait_until

SEED, STREAMS, PROMPT, TOKENS = 20261128, 4, 90, 600
MODEL = ("--served-model-name", "tiny", "--calibration-ms", "0", "--max-model-len", "1024")

WAYS = {
    "push": ("--kv-transfer", "push"),
    "pull": ("--kv-transfer", "pull", "--transport", "tcp"),
    "drafts": ("--speculative-method", "ngram", "--no-enable-prefix-caching"),
}


def bodies() -> list[Body]:
    made = [body | {"model": "tiny"} for body in random_bodies(STREAMS, PROMPT, TOKENS, SEED)]
    made[1] |= {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5}
    made[2] |= {"logprobs": 2}
    made[3] |= {"guided_regex": "[a-z ]{3000}", "ignore_eos": False}
    return made


def running(node: Node) -> int:
    return int(rest.get(f"{node.url}/debug/state")["engine"]["running"])


def asked_to_leave(node: Node) -> bool:
    """On a busy machine a node may take the other one for dead for a moment, and refuses to be the last to leave."""
    try:
        rest.post(f"{node.url}/drain", {"timeout_s": 60.0, "grace_s": 0.0})
    except rest.RestError as refused:
        assert refused.status == 409, refused
        return False
    return True


async def drained(cluster: LocalCluster, door: Node, given: Sequence[Body]) -> tuple[list[Stream], str]:
    """All streams run, then the busier decode node leaves; it must be gone before they end. Returns (the streams, the
    node that stays)."""
    async with Load([door.url], given, "moved", once=True) as load:
        await load.until(lambda: load.with_tokens(20) == len(given))
        stays, leaver = sorted((cluster["decode-0"], cluster["decode-1"]), key=running)
        leaver.expected_dead = True
        await asyncio.to_thread(wait_until, lambda: asked_to_leave(leaver), "it knows another decode node")
        assert await asyncio.to_thread(leaver.process.wait, 60) == 0
    return load.streams, stays.name


@pytest.mark.parametrize("way", ["push", "drafts", pytest.param("pull", marks=pytest.mark.heavy)])
def test_a_node_that_leaves_moves_its_requests(start: Start, tiny_model, way):
    print(f"seed {SEED}")
    given = bodies()
    with start("prefill=1,decode=2", *tiny_model, *MODEL, *WAYS[way]) as cluster:
        door = cluster["prefill-0"]
        calm = asyncio.run(each_once(door.url, given, "calm"))
        streams, stays = asyncio.run(drained(cluster, door, given))
        assert [one.error for one in streams] == [""] * STREAMS
        moved = [move for number in range(STREAMS) for move in moves_of(door.url, f"moved-{number}")]
        state = rest.get(f"{cluster[stays].url}/debug/state")["engine"]
    assert [one.tokens for one in streams] == [one.tokens for one in calm]
    assert moved, "the node that left had requests"
    assert all(one["detail"]["to"] == stays and one["detail"]["reason"] == "drain" for one in moved)
    assert state["integrity"] is None and not state["held_for_requests"]["requests"]


async def spread(cluster: LocalCluster, door: Node, given: Sequence[Body]) -> list[Stream]:
    """All streams run on the only decode node; then another one joins."""
    async with Load([door.url], given, "spread", once=True) as load:
        await load.until(lambda: load.with_tokens(5) == len(given))
        joining = asyncio.create_task(asyncio.to_thread(cluster.add, "decode"))
        await load.until(lambda: False)
        await joining
    return load.streams


def test_a_busy_node_gives_requests_to_an_idle_one(start: Start, tiny_model):
    """With few seats and blocks: the streams would not all fit."""
    given = [body | {"model": "tiny"} for body in random_bodies(6, PROMPT, 1500, SEED)]
    room = ("--max-num-seqs", "8", "--kv-cache-bytes", "12M", "--migration", "balance", "--speculative-method", "none")
    with start(
        "prefill=1,decode=1", *tiny_model, "--served-model-name", "tiny", "--calibration-ms", "0", *room
    ) as cluster:
        door = cluster["prefill-0"]
        streams = asyncio.run(spread(cluster, door, given))
        calm = asyncio.run(each_once(door.url, given, "calm"))
        moved = [move for number in range(len(given)) for move in moves_of(door.url, f"spread-{number}")]
        metrics = get_text(f"{cluster['decode-0'].url}/metrics")
    assert [one.error for one in streams] == [""] * len(given)
    assert [one.tokens for one in streams] == [one.tokens for one in calm]
    assert moved and {one["detail"]["reason"] for one in moved} <= {"balance", "pressure"}
    assert "mooncake:migrations_total{" in metrics


def get_text(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())
