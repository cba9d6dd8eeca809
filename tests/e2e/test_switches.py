"""What real nodes do without techniques that are on by default; policy_flags.py names the test of each switch."""

from __future__ import annotations

import json
import mmap
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine.config.machine import free_bytes, total_bytes
from engine.node.local_store import DRAM_REGION
from lab.launch import rest
from lab.launch.nodes import Node
from tests.e2e.conftest import TINY, Start, complete, settled, timeline, wait_until

BLOCK, BLOCK_BYTES = 16, 12288
"""Tokens and bytes of a block of the tiny model."""

CONTEXT = 640
PROMPT = [1000 + i for i in range(20 * BLOCK + 1)]
SMALL = ("--max-model-len", str(CONTEXT), "--kv-cache-bytes", str(CONTEXT // BLOCK * BLOCK_BYTES))
SHARES = {"mixed": ["--dram-bytes", "0"], "store": ["--dram-bytes", "16M"]}
BURSTS, LONG = 5, 1500


def reused(url: str, prompt: list[int]) -> tuple[int, str]:
    """(tokens of the prompt that were not computed, answer)"""
    answer = complete(url, prompt, 8, ignore_eos=True)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]


def zero_pooled_blocks(node: Node) -> None:
    """Overwrite the blocks in the DRAM of the node's share, without its knowledge."""
    names = {}
    for file in Path(f"/proc/{node.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the node closes others meanwhile
            names[file] = str(file.readlink())
    (path,) = [file for file, name in names.items() if name.startswith(f"/memfd:{DRAM_REGION} ")]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        assert memory.find(b"\1") >= 0, "the share is empty"
        memory[:] = bytes(len(memory))


def test_block_checksums(start: Start, tiny_model: list[str]):
    """Without them nobody notices damaged blocks of the pool (with them: tests/e2e/test_pool_damage.py)."""
    flags = (*SMALL, "--prefix-fetch", "always", "--no-block-checksums")
    with start("mixed=1,store=1", *tiny_model, *flags, role_flags=SHARES) as cluster:
        url = cluster["mixed-0"].url
        found, right = reused(url, PROMPT)
        assert found == 0
        settled(cluster)
        reused(url, [2000 + i for i in range(CONTEXT - 8)])  # fills the arena
        settled(cluster)
        zero_pooled_blocks(cluster["store-0"])
        found, text = reused(url, PROMPT)
        assert found == len(PROMPT) - 1 and text != right
        settled(cluster)


def test_prefix_caching(start: Start, tiny_model: list[str]):
    """Without it a prompt is computed each time, and no block goes to the pool."""
    with start("mixed=1,store=1", *tiny_model, "--no-enable-prefix-caching", role_flags=SHARES) as cluster:
        url = cluster["mixed-0"].url
        first, second = reused(url, PROMPT), reused(url, PROMPT)
        assert first == second and first[0] == 0
        states = settled(cluster)
        assert states["store-0"]["store"]["dram"]["blocks"] == 0


def computing(urls: list[str], number: int) -> int:
    """Decisions about one new long prompt, asked at these nodes at once, that knew of another node which computes
    it."""
    prompt = [3000 + number, *range(3, LONG)]
    with ThreadPoolExecutor(len(urls)) as clients:
        answers = list(clients.map(lambda url: complete(url, prompt, 1)["id"], urls))
    decisions = [timeline(url, one)["decisions"] for url, one in zip(urls, answers, strict=True)]
    return sum(bool(decision["computing"]) for made in decisions for decision in made)


def test_prefix_intents(start: Start, tiny_model: list[str]):
    """A node without them does not know what others are about to compute; tests/e2e/test_burst.py shows what they
    save. The node that accepts a request decides: those with the switch and those without are in one cluster."""
    without = [f"store-{number}" for number in range(1, 5)]
    switches = {name: ["--no-prefix-intents"] for name in without}
    flags = ("--max-num-batched-tokens", "256")
    with start("prefill=2,decode=1,store=5", *tiny_model, *flags, role_flags=switches) as cluster:
        for node in cluster.nodes:  # so that every node knows all others
            complete(node.url, PROMPT, 1)
        those = [node.url for node in cluster.nodes if node.name not in without]
        others = [cluster[name].url for name in without]
        found = [sum(computing(urls, i * BURSTS + n) for n in range(BURSTS)) for i, urls in enumerate((those, others))]
        settled(cluster)
    assert found[0] > 0 == found[1]


def seats(node: Node) -> int:
    """Requests that it computes or decodes."""
    found: int = rest.get(f"{node.url}/debug/state")["engine"]["running"]
    return found


def placed(url: str, prompt: list[int]) -> dict[str, Any]:
    """This node's decision for a prompt."""
    (decision,) = timeline(url, complete(url, prompt, 8, ignore_eos=True)["id"])["decisions"]
    found: dict[str, Any] = decision
    return found


def test_placement_tolls(start: Start, tiny_model: list[str], tmp_path: Path):
    """While one of two nodes decodes, prompts pay a toll there, and decodes pay one on the other node; without the
    switch nobody pays. The node that accepts a request decides."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 16}))
    shutil.copy(Path(tiny_model[1]) / "tokenizer.json", tmp_path)
    model = ["--model", str(tmp_path), *tiny_model[2:], "--no-enable-prefix-caching"]
    with start("mixed=2", *model, role_flags={"mixed-1": ["--no-placement-tolls"]}) as cluster:
        urls = [node.url for node in cluster.nodes]
        for url in urls:  # so that every node knows the other one
            complete(url, PROMPT, 1)
        ended = threading.Event()

        def decode() -> None:
            while not ended.is_set():
                complete(urls[0], PROMPT, 1600, ignore_eos=True)

        with ThreadPoolExecutor(1) as client:
            client.submit(decode)
            try:
                wait_until(lambda: any(map(seats, cluster.nodes)), "it has a seat")
                tolled, free = ([placed(url, [*PROMPT, number]) for number in range(4)] for url in urls)
            finally:
                ended.set()
        settled(cluster)
    paid = []
    for decision in (*tolled, *free):
        for stage, estimate in (("prefill", "ttft_s"), ("decode", "decode_s")):
            rows = {row["node"]: row for row in decision["considered"] if row["stage"] == stage and not row["skipped"]}
            total = {node: row[estimate] + row["toll_s"] for node, row in rows.items()}
            assert decision[stage] == min(total, key=total.__getitem__), rows
            if decision in tolled:
                paid += [(stage, row.get("running")) for row in rows.values() if row["toll_s"] > 0]
            else:
                assert not any(row["toll_s"] for row in rows.values()), rows
    assert ("prefill", None) in paid and ("decode", 0) in paid, paid


def shared_bytes(node: Node) -> int:
    """Resident shared memory of the node's process."""
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("RssShmem:")]
    return int(kib) << 10


def test_prefault(start: Start):
    """An idle node touches its arena; without the switch only what is used becomes resident."""
    if free_bytes() - total_bytes() // 4 < 1 << 30:
        pytest.skip("the machine has too little free memory, so no node touches its arena")
    flags = ("--model", "none", "--dram-bytes", "64M")
    with start("store=1", *flags) as cluster:
        wait_until(lambda: shared_bytes(cluster.nodes[0]) >= 64 << 20, "the arena is resident")
    with start("store=1", *flags, "--no-prefault") as cluster:
        assert shared_bytes(cluster.nodes[0]) < 16 << 20


def test_templates_of_clients(start: Start, tiny_model: list[str]):
    """A request's template is refused by name, and rendered where clients are trusted."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "chat_template": "{{ messages[0].content }}",
    }
    trusts = {"store-0": ["--trust-request-chat-template"]}  # a mixed node has that role too
    with start("mixed=1,store=1", *tiny_model, role_flags=trusts) as cluster:
        with pytest.raises(rest.RestError, match="--trust-request-chat-template"):
            rest.post(f"{cluster['mixed-0'].url}/v1/chat/completions", body)
        url = f"{cluster['store-0'].url}/v1/chat/completions"
        short = rest.post(url, body)["usage"]["prompt_tokens"]
        long = body | {"chat_template": "{{ messages[0].content }} and more words"}
        assert rest.post(url, long)["usage"]["prompt_tokens"] > short
