"""Models whose layers are in groups with block tables of their own (a tiny Gemma 3, a tiny gpt-oss), on the ways of
test_same_tokens.py: the greedy tokens of transformers in float32 after chunks, a hand-over of what the decode node
needs, the store's DRAM and SSD, preemptions, and kills of a decode and of a prefill node. The windows are 20 tokens,
the prompts up to 331."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.layer_groups import layer_groups
from engine.checkpoint.model_source import describe
from engine.text.tokenizer import Tokenizer
from lab.faults.client import random_bodies
from lab.launch import rest
from tests.e2e.conftest import SMALL, Start, complete, model_of, settled
from tests.e2e.test_latent import NEW_TOKENS, PROMPTS, answers, events
from tests.e2e.test_only_node import TOKENS, cut, half_way, one_has_begun, streams
from tests.engine.model.test_model import their_greedy
from tests.engine.tiny_families import save

WINDOWS = {"gemma3": (20, 20, 20, 20, 20, 0, 20), "gpt-oss": (20, 0, 20, 0)}
HEADS = {"gemma3": (2, 32), "gpt-oss": (2, 16)}
Saved = tuple[list[str], dict[str, str], BlockGeometry]


@pytest.fixture(scope="module", params=WINDOWS)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Flags of a node, the answers of transformers, and the blocks."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    theirs = save(name, Path(folder), vocab_size=49152)
    tokenizer = Tokenizer.load(describe("smollm2-135m-instruct"))
    tokenizer.save(folder / "tokenizer.json")
    expected = {
        case: tokenizer.decode(their_greedy(theirs, ids, NEW_TOKENS), skip_special_tokens=True)
        for case, ids in PROMPTS.items()
    }
    groups = layer_groups(WINDOWS[name])
    assert groups is not None
    geometry = BlockGeometry(groups.layers, *HEADS[name], 16, "float32", groups=groups)
    return ["--model", str(folder), "--dtype", "float32", *SMALL], expected, geometry


def test_prefill_decode_and_store_nodes(start: Start, model, tmp_path):
    """Only the last blocks of a window are handed over; a node with an empty arena fetches only those, from DRAM and
    SSD."""
    flags, expected, geometry = model
    ssd = {"store": ["--ssd-path", str(tmp_path / "{node}")]}
    flags = [*flags, "--max-num-batched-tokens", "100", "--prefix-fetch", "always"]
    with start("prefill=1,decode=1,store=1", *flags, role_flags=ssd) as cluster:
        url = cluster["store-0"].url
        page = PROMPTS["page"]
        answer = complete(url, page, NEW_TOKENS, ignore_eos=True)
        (moved,) = events(url, answer, "kv_moved")
        assert moved["bytes"] == geometry.handover_blocks(len(page)) * geometry.block_bytes
        assert geometry.handover_blocks(len(page)) < geometry.num_groups * 10
        assert answers(url) == expected
        assert answers(url) == expected  # from the prefix cache
        settled(cluster)

        chapter, full = PROMPTS["chapter"], (len(PROMPTS["chapter"]) - 1) // 16
        wanted = geometry.handover_blocks(full * 16)
        assert wanted < geometry.num_groups * full
        for tier, restarted in (("dram", ["prefill-0"]), ("ssd", ["store-0", "decode-0", "prefill-0"])):
            for name in restarted:  # arenas are empty now; the pool is not, or what is left of it is on SSD
                cluster.restart(name)
            url = cluster["decode-0"].url
            answer = complete(url, chapter, NEW_TOKENS, ignore_eos=True)
            assert answer["choices"][0]["text"] == expected["chapter"]
            (load,) = events(url, answer, "prefix_fetched")
            assert load["blocks"] == wanted and load["tiers"] == {tier: wanted}
            settled(cluster)


def test_kills_in_the_middle_of_streams(start: Start, model):
    """kill -9 of the only decode node, then of the only prefill node while it computes prompts: the same tokens."""
    flags, _, _ = model
    with start("prefill=1,decode=1,store=1", *flags, "--max-num-batched-tokens", "64") as cluster:
        url = cluster["store-0"].url
        bodies = [body | {"model": model_of(url)} for body in random_bodies(4, 300, TOKENS, 6)]
        calm = asyncio.run(streams(url, bodies, "calm", half_way, lambda: None))
        for victim, due in (("decode-0", half_way), ("prefill-0", one_has_begun)):
            cut(cluster, victim, "store-0", bodies, calm, due, least=1)


def test_a_small_arena(start: Start, model):
    """Four requests, of which two fit: preempted, resumed, and each gets the tokens that it gets alone. A prompt that
    fits only because windows are given back is served."""
    flags, expected, geometry = model
    blocks = 21 + (geometry.num_groups - 1) * 8
    if len(geometry.groups.windows) == 2:
        assert blocks < 2 * 21
    small = ("--kv-cache-bytes", str(blocks * geometry.block_bytes), "--max-num-batched-tokens", "32")
    prompts = [list(range(1000 * i, 1000 * i + 150)) for i in range(1, 5)]
    with start("mixed=1", *flags, *small, "--max-model-len", "336", "--dram-bytes", "0") as cluster:
        url = cluster.nodes[0].url
        page = complete(url, PROMPTS["page"], NEW_TOKENS, ignore_eos=True)
        assert page["choices"][0]["text"] == expected["page"]
        chapter = complete(url, PROMPTS["chapter"][:324], NEW_TOKENS, ignore_eos=True)
        assert chapter["usage"]["completion_tokens"] == NEW_TOKENS

        def ask(prompt: list[int]) -> str:
            text: str = complete(url, prompt, 44, ignore_eos=True)["choices"][0]["text"]
            return text

        alone = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(ask, prompts)) == alone
        settled(cluster)


def test_a_pool_of_ends(start: Start, model):
    """--pool-windows ends: the pool has fewer blocks of windows. The same prompt comes back from it; one that shares a
    beginning with it is computed, and goes on where the other ended."""
    flags, expected, geometry = model
    groups, chapter = geometry.groups, PROMPTS["chapter"]
    full = (len(chapter) - 1) // 16
    with start("prefill=1,decode=1,store=1", *flags, "--pool-windows", "ends", "--prefix-fetch", "always") as cluster:
        url = cluster["decode-0"].url

        def fetched(prompt: list[int]) -> tuple[str, list[int]]:
            """The answer, and the blocks that came from the pool."""
            body = complete(url, prompt, NEW_TOKENS, ignore_eos=True)
            settled(cluster)
            return body["choices"][0]["text"], [load["blocks"] for load in events(url, body, "prefix_fetched")]

        def stored() -> int:
            states = (rest.get(f"{node.url}/debug/state")["store"] for node in cluster.nodes)
            return sum(state["dram"]["blocks"] for state in states if state and "dram" in state)

        assert fetched(chapter) == (expected["chapter"], [])
        behind = (len(chapter) + NEW_TOKENS - 1) // 16 - full  # the answer's
        ends = full - min(groups.first_needed(group, full * 16, 16) for group in range(1, geometry.num_groups))
        assert stored() == full + behind + (geometry.num_groups - 1) * (ends + behind)
        longer, alone = [*chapter, *range(700, 740)], [*chapter[:160], *range(800, 840)]
        cluster.restart("prefill-0")  # its arena is empty now; the pool is not
        assert fetched(alone)[1] == [], "no window of 160 tokens is in the pool"
        cluster.restart("prefill-0")
        assert fetched(chapter) == (expected["chapter"], [geometry.handover_blocks(full * 16)])
        cluster.restart("prefill-0")
        assert fetched(longer)[1] == [geometry.handover_blocks(full * 16)]
        cluster.restart("prefill-0")
        text, loads = fetched(alone)
        assert len(loads) == 1, "its own end is there"
        cluster.restart("prefill-0", "--prefix-fetch", "never")
        assert fetched(alone) == (text, [])


@pytest.mark.heavy
def test_uniform_blocks(start: Start, model):
    """--kv-groups uniform: all layers of every block move, for the same tokens. A node of the other kind may not
    join."""
    flags, expected, geometry = model
    with start("prefill=1,decode=1", *flags, "--kv-groups", "uniform", "--max-num-batched-tokens", "96") as cluster:
        url = cluster["decode-0"].url
        answer = complete(url, PROMPTS["page"], NEW_TOKENS, ignore_eos=True)
        assert answer["choices"][0]["text"] == expected["page"]
        (moved,) = events(url, answer, "kv_moved")
        assert moved["bytes"] == 10 * geometry.model_layers * geometry.layer_bytes
        settled(cluster)
