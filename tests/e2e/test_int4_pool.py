"""The embedded model's prefix comes back from the pool in four bits per element: the answer goes on as before. Blocks
with a flipped byte are misses. With int4-auto, blocks are in four bits once the link to their home is known to be
slow."""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from cache.block import BlockGeometry
from engine.node.local_store import DRAM_REGION
from engine.pooled.rounding import REFRESH_INTERVAL_S
from lab.launch import rest
from lab.launch.nodes import Node
from tests.e2e.conftest import Start, complete, settled, timeline, wait_until

CONTEXT = 320
GEOMETRY = BlockGeometry(30, 3, 64, 16, "float32", "int4")  # of the embedded model
FLAGS = ("--dtype", "float32", "--max-model-len", str(CONTEXT), "--calibration-ms", "100", "--pool-dtype", "int4")
ARENA = ("--kv-cache-bytes", str(CONTEXT // 16 * GEOMETRY.block_bytes))
SHARES = {"mixed": ["--dram-bytes", "0"], "store": ["--dram-bytes", "64M"]}
PROMPT = "Question: What is the capital of France? Answer: Paris. " * 12
FILL = [2000 + i for i in range(CONTEXT - 8)]


SLOW = (
    *("--transport", "tcp", "--rail-limit", "16000000", "--store-timeout-ms", "20000"),
    *("--kv-cache-dtype", "bfloat16", "--pool-dtype", "int4-auto", "--max-step-ms", "60000"),
)
"""Bytes per second: even a busy core decodes blocks several times as fast. Prompts are whole steps: a link is measured
by puts of a mebibyte and more on one rail; a slow core would put the blocks of short steps one by one."""

SHORT = "Question: What is the capital of France? Answer: Paris. " * 4
"""Three whole blocks, too few bytes to measure a link by."""
OTHER = "Question: What is the capital of Italy? Answer: Rome. " * 12


def flip_pooled_bytes(node: Node) -> None:
    """Change one bit in every 4096 bytes of the node's share, without its knowledge."""
    names = {}
    for file in Path(f"/proc/{node.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the node closes others meanwhile
            names[file] = str(file.readlink())
    (path,) = [file for file, name in names.items() if name.startswith(f"/memfd:{DRAM_REGION} ")]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in range(7, len(memory), 4096):
            memory[at] ^= 0x10


def test_a_prefix_in_four_bits_and_a_flipped_byte(start: Start):
    with start("mixed=1,store=1", *FLAGS, *ARENA, "--prefix-fetch", "always", role_flags=SHARES) as cluster:
        url, store = cluster["mixed-0"].url, cluster["store-0"]

        def answer() -> tuple[str, int, list[dict[str, object]]]:
            """(text, cached tokens, details of the fetched prefix)"""
            body = complete(url, PROMPT, 8, ignore_eos=True)
            settled(cluster)
            events = timeline(url, body["id"])["events"]
            fetched = [event["detail"] for event in events if event["event"] == "prefix_fetched"]
            return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"], fetched

        def forget() -> None:
            complete(url, FILL, 1)  # the whole arena
            settled(cluster)

        first, cached, fetched = answer()
        assert (cached, fetched) == (0, []) and first.strip()
        forget()
        again, cached, (detail,) = answer()
        assert cached > 100 and cached % 16 == 0
        assert (detail["tiers"], detail["bytes"]) == ({"dram": cached // 16}, cached // 16 * GEOMETRY.pool_bytes)
        assert again == first, "a prompt that leaves no doubt how it goes on"
        forget()
        before = rest.get(f"{store.url}/debug/state")["store"]["dram"]["corrupt"]
        flip_pooled_bytes(store)
        text, cached, _ = answer()
        assert (text, cached) == (first, 0)
        settled(cluster)
        assert rest.get(f"{store.url}/debug/state")["store"]["dram"]["corrupt"] > before


def test_blocks_are_rounded_once_their_link_is_known_to_be_slow(start: Start):
    """The first prompt is put before the link is measured, the last one behind it. Both come back as they were put."""
    exact, short = (BlockGeometry(30, 3, 64, 16, "bfloat16", "int4-auto").block_bytes, GEOMETRY.int4_bytes)
    arena = ("--kv-cache-bytes", str(CONTEXT // 16 * exact))
    with start("mixed=1,store=1", *FLAGS, *arena, "--prefix-fetch", "always", *SLOW, role_flags=SHARES) as cluster:
        url = cluster["mixed-0"].url

        def forms() -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = settled(cluster)["mixed-0"]["engine"]["pool_forms"]
            return found

        def answer(prompt: str) -> tuple[str, int, list[dict[str, object]]]:
            body = complete(url, prompt, 8, ignore_eos=True)
            settled(cluster)
            events = timeline(url, body["id"])["events"]
            fetched = [event["detail"] for event in events if event["event"] == "prefix_fetched"]
            return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"], fetched

        first, *_ = answer(SHORT)
        assert forms()["put"] == {"exact": 3, "int4": 0}, "before the link is measured"

        def measured() -> bool:
            complete(url, FILL, 1, cache_salt=str(next(salts)))
            (path,) = [path for path in settled(cluster)["mixed-0"]["paths"] if path["peer"] == "store-0"]
            return any(rail["gb_per_s"] > 0 for rail in path["rails"])

        salts = count()
        wait_until(measured, "the link is measured")
        put = forms()["put"]
        time.sleep(REFRESH_INTERVAL_S)  # a fast node has the next prompt's blocks before it looks at the link again
        second, *_ = answer(OTHER)
        rounded = forms()["put"]["int4"] - put["int4"]
        assert rounded > 6 and forms()["put"]["exact"] == put["exact"], "now every block pays"
        complete(url, FILL, 1)  # the whole arena
        settled(cluster)
        again, cached, (detail,) = answer(OTHER)
        blocks = cached // 16
        assert again == second and blocks > 6, "a prompt that leaves no doubt how it goes on"
        assert (detail["bytes"], detail["saved_bytes"]) == (blocks * short, blocks * (exact - short))
        again, cached, (detail,) = answer(SHORT)
        assert again == first and (detail["bytes"], "saved_bytes" in detail) == (cached // 16 * exact, False)
        assert forms()["got"] == {"exact": cached // 16, "int4": blocks}
