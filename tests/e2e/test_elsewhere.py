"""Attention elsewhere (--attention-elsewhere): the tokens of a large arena, whoever holds the blocks and dies."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import Node
from tests.e2e.conftest import Start, complete, settled, timeline, wait_until

TOKEN_BYTES, BLOCK = 768, 16
ARENA_TOKENS = 384
LONG, OUTPUT = 4 * ARENA_TOKENS, 120
LAYERS = 3
EVERY = ("--calibration-ms", "300", "--num-threads", "1", "--max-num-batched-tokens", "64", "--prefix-fetch", "always")
ASKING = (
    "--kv-cache-bytes",
    str(ARENA_TOKENS * TOKEN_BYTES),
    "--dram-bytes",
    "4M",
    "--beyond-memory",
    "on",
    "--attention-elsewhere",
    "always",
    "--slo",
    "standard:tbt=60",
)
HOT = 64 // BLOCK + 1
COLD = -(-(LONG + OUTPUT) // BLOCK) - HOT
"""Blocks beyond the arena, for a prompt and its answer."""


def prompt(number: int) -> list[int]:
    return [5 + number + i * 13 % 40000 for i in range(LONG)]


def answer_of(url: str, number: int) -> dict[str, Any]:
    return complete(url, prompt(number), OUTPUT, ignore_eos=True)


def text(answer: dict[str, Any]) -> str:
    assert answer["usage"]["completion_tokens"] == OUTPUT
    return str(answer["choices"][0]["text"])


def events(url: str, answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one["detail"] for one in timeline(url, answer["id"])["events"] if one["event"] == name]


@pytest.fixture(scope="module")
def right(start: Start, tiny_model: list[str]) -> list[str]:
    """The answers of a node with a large arena."""
    with start("mixed=1", *tiny_model, *EVERY, "--kv-cache-bytes", "16M") as cluster:
        return [text(answer_of(cluster.nodes[0].url, number)) for number in range(2)]


def state(node: Node) -> dict[str, Any]:
    return dict(rest.get(f"{node.url}/debug/state"))


def lending(node: Node) -> dict[str, Any]:
    return dict(state(node)["lending"])


def asking(node: Node) -> dict[str, Any]:
    return dict(state(node)["engine"]["beyond_memory"]["elsewhere"])


def idle(cluster: LocalCluster) -> None:
    """Nothing is held in any arena, nor in the DRAM of any share, nor lent."""
    settled(cluster)
    for node in cluster.nodes:
        if node.alive:
            wait_until(lambda node=node: not state(node)["store"]["dram"]["held"], f"{node.name} holds {state(node)}")
            assert lending(node)["leases"] == lending(node)["lent"] == 0


def metric(node: Node, name: str, prefix: str = "mooncake") -> float:
    lines = [line for line in rest.text(f"{node.url}/metrics").splitlines() if line.startswith(f"{prefix}:{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def in_the_middle(node: Node, answer: Future[Any], tokens: int = 20) -> None:
    """Wait until the holder has been asked about this many tokens of the answer."""
    prompt_asks = (LONG // 64 + 1) * LAYERS
    wait_until(lambda: lending(node)["asks"] > prompt_asks + tokens * LAYERS, f"asks of {node.name}", within_s=200)
    assert not answer.done(), "it must be lost while tokens flow"


def test_a_store_node_attends_to_a_context_four_times_the_arena(start: Start, tiny_model, right):
    """No block beyond the arena lies on the decode node; other requests run beside; a second request finds the blocks
    where they are."""
    with start("mixed=1,store=1", *tiny_model, *EVERY, *ASKING) as cluster:
        mixed, store = cluster["mixed-0"], cluster["store-0"]
        with ThreadPoolExecutor(3) as clients:
            asked = [clients.submit(answer_of, mixed.url, number) for number in range(2)]
            short = clients.submit(complete, mixed.url, prompt(0)[:100], 8)
            assert short.result()["usage"]["completion_tokens"] == 8
            assert [text(one.result()) for one in asked] == right
        for one in asked:
            (found,) = events(mixed.url, one.result(), "beyond_memory")
            assert found["held_blocks"] == {"store-0": COLD} and found["near_bytes"] == 0 and found["token_s"] > 0
        idle(cluster)
        done = asking(mixed)
        assert done["asks"] == lending(store)["asks"] >= 2 * OUTPUT * LAYERS and done["fallbacks"] == 0
        assert done["stored"] >= COLD
        assert metric(mixed, "attention_asks_total") == done["asks"]
        assert metric(mixed, "attention_asked_bytes_total") == done["query_bytes"] + done["part_bytes"]
        again = answer_of(mixed.url, 0)
        assert text(again) == right[0]
        (found,) = events(mixed.url, again, "beyond_memory")
        assert found["known_tokens"] > LONG // 2, "the store has named them"
        idle(cluster)


def test_the_rule_asks_where_nothing_else_has_room_and_refusals_count_it(start: Start, tiny_model, right):
    small = ("--attention-elsewhere", "auto", "--max-model-len", "2048")
    shares = {"mixed-0": ("--dram-bytes", "300k")}
    with start("mixed=1,store=1", *tiny_model, *EVERY, *ASKING, *small, role_flags=shares) as cluster:
        mixed, store = cluster["mixed-0"], cluster["store-0"]
        answer = answer_of(mixed.url, 0)
        assert text(answer) == right[0]
        (found,) = events(mixed.url, answer, "beyond_memory")
        assert found["near_bytes"] > 0 and COLD - 30 < found["held_blocks"]["store-0"] < COLD
        idle(cluster)
        cluster.kill(store.name, signal.SIGKILL)
        with pytest.raises(rest.RestError, match=rf"need {COLD} blocks of 12288 bytes .* its DRAM share has 18 "):
            answer_of(mixed.url, 1)
        idle(cluster)


def test_a_prefill_node_holds_blocks_of_the_decode_node(start: Start, tiny_model, right):
    with start("prefill=1,decode=1", *tiny_model, *EVERY, *ASKING) as cluster:
        answer = answer_of(cluster["prefill-0"].url, 0)
        assert text(answer) == right[0]
        (found,) = events(cluster["prefill-0"].url, answer, "beyond_memory")
        assert found["held_blocks"] == {"prefill-0": COLD}
        idle(cluster)


def test_a_holder_that_is_killed_is_a_pause(start: Start, tiny_model, right):
    shares = {"store-0": ("--dram-bytes", "700k"), "store-1": ("--dram-bytes", "700k")}  # both are needed
    flags = (*tiny_model, *EVERY, *ASKING)
    with start("mixed=1,store=2", *flags, role_flags=shares) as cluster, ThreadPoolExecutor(1) as client:
        mixed, victim = cluster["mixed-0"], cluster["store-1"]
        answer = client.submit(answer_of, mixed.url, 0)
        in_the_middle(victim, answer)
        cluster.kill(victim.name, signal.SIGKILL)
        assert text(answer.result()) == right[0]
        before, after = events(mixed.url, answer.result(), "beyond_memory")
        lent = int(0.75 * (700 * 1024 // (BLOCK * TOKEN_BYTES)))
        assert before["held_blocks"] == {"store-0": lent, "store-1": lent}
        assert after["held_blocks"] == {"store-0": lent}
        assert after["known_tokens"] >= (COLD - 2 * lent) * BLOCK, "what its own DRAM has is not computed again"
        assert asking(mixed)["fallbacks"] == metric(mixed, "attention_fallbacks_total") == 1
        idle(cluster)


def test_a_holder_that_hangs_is_a_pause(start: Start, tiny_model, right):
    """Its connections stay open: the deadline of an ask, or gossip, ends the wait."""
    with start("mixed=1,store=1", *tiny_model, *EVERY, *ASKING) as cluster, ThreadPoolExecutor(1) as client:
        mixed, store = cluster["mixed-0"], cluster["store-0"]
        answer = client.submit(answer_of, mixed.url, 1)
        in_the_middle(store, answer)
        os.kill(store.pid, signal.SIGSTOP)
        try:
            assert text(answer.result()) == right[1]
        finally:
            os.kill(store.pid, signal.SIGCONT)
        _, after = events(mixed.url, answer.result(), "beyond_memory")
        assert after["held_blocks"] == {} and after["near_bytes"] > 3 * ARENA_TOKENS * TOKEN_BYTES
        assert asking(mixed)["fallbacks"] == 1
        idle(cluster)


def test_other_requests_go_on_while_a_holder_hangs(start: Start, tiny_model, right):
    """Only the request that asks it waits, until its deadline; the others' tokens keep coming. The test counts those
    that are made before the holder is given up."""
    with start("mixed=1,store=1", *tiny_model, *EVERY, *ASKING) as cluster, ThreadPoolExecutor(2) as clients:
        mixed, store = cluster["mixed-0"], cluster["store-0"]
        answer = clients.submit(answer_of, mixed.url, 1)
        in_the_middle(store, answer)
        made = []  # tokens, each time before the holder was given up
        os.kill(store.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: asking(mixed)["late"] > 0, "a step went on without it")
            short = clients.submit(complete, mixed.url, prompt(2)[:20], 150, ignore_eos=True)
            while not asking(mixed)["fallbacks"]:
                made.append(metric(mixed, "generation_tokens_total", "vllm"))
                assert not answer.done() or asking(mixed)["fallbacks"], "the answer needs the holder, or a fallback"
                time.sleep(0.02)
            assert text(answer.result()) == right[1]
            assert short.result()["usage"]["completion_tokens"] == 150
        finally:
            os.kill(store.pid, signal.SIGCONT)
        assert made and made[-1] - made[0] >= 20, f"{made}: the other request waited for the holder"
        idle(cluster)


def test_a_holder_that_is_late_is_a_pause_of_its_own_request(start: Start, tiny_model, right):
    """It goes on before the deadline: its answer counts, and nothing falls back."""
    with start("mixed=1,store=1", *tiny_model, *EVERY, *ASKING) as cluster, ThreadPoolExecutor(1) as client:
        mixed, store = cluster["mixed-0"], cluster["store-0"]
        answer = client.submit(answer_of, mixed.url, 0)
        in_the_middle(store, answer)
        os.kill(store.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: asking(mixed)["late"] > 0, "a step went on without it")
        finally:
            os.kill(store.pid, signal.SIGCONT)
        assert text(answer.result()) == right[0]
        idle(cluster)


def test_a_decode_node_that_is_killed_leaves_no_lease(start: Start, tiny_model, right):
    """By membership: long before a lease runs out."""
    shares = {"mixed-0": ("--dram-bytes", "300k"), "mixed-1": ("--dram-bytes", "300k")}
    flags = (*tiny_model, *EVERY, *ASKING, "--max-model-len", "2048")
    with start("mixed=2,store=1", *flags, role_flags=shares) as cluster, ThreadPoolExecutor(1) as client:
        store = cluster["store-0"]
        answer = client.submit(answer_of, store.url, 0)
        in_the_middle(store, answer)
        (victim,) = [node for node in cluster.nodes if node.name != "store-0" and asking(node)["leases"]]
        cluster.kill(victim.name, signal.SIGKILL)
        assert text(answer.result()) == right[0]
        wait_until(lambda: not lending(store)["leases"], "leases of the dead node", within_s=20)
        assert lending(store)["expired"] == 0
        idle(cluster)
