"""A model with layers that keep a state (a tiny Qwen3-Next) on the ways of test_same_tokens.py: the greedy tokens of
transformers in float32 after chunks, a hand-over with one state, the tiers of the pool, preemptions, and kills."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.layer_groups import layer_groups
from engine.checkpoint.model_source import describe
from engine.text.tokenizer import Tokenizer
from lab.faults.client import random_bodies
from tests.e2e.conftest import Start, complete, model_of, settled
from tests.e2e.test_latent import NEW_TOKENS, PROMPTS, answers, events
from tests.e2e.test_only_node import TOKENS, cut, half_way, one_has_begun, streams
from tests.engine.model.test_model import their_greedy
from tests.engine.tiny_families import save

INTERVAL = 4  # blocks of 16 tokens between two saved states
HEAD = [*PROMPTS["chapter"][:150], *range(7000, 7030)]  # 150 tokens of another prompt, whose last saved state is at 128
CASES = PROMPTS | {"head": HEAD}
Saved = tuple[list[str], dict[str, str], BlockGeometry]


@pytest.fixture(scope="module", params=["qwen3-next", pytest.param("kimi-linear", marks=pytest.mark.heavy)])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Flags of a node, the answers of transformers, and the blocks."""
    folder = Path(tmp_path_factory.mktemp("states"))
    theirs = save(request.param, folder, vocab_size=49152)
    tokenizer = Tokenizer.load(describe("smollm2-135m-instruct"))
    tokenizer.save(folder / "tokenizer.json")
    expected = {
        case: tokenizer.decode(their_greedy(theirs, ids, NEW_TOKENS), skip_special_tokens=True)
        for case, ids in CASES.items()
    }
    config = describe(str(folder)).config
    layer = BlockGeometry(1, config.num_kv_heads, config.head_size, 16, "float32", kind=config.kv_kind)
    groups = layer_groups(config.windows, config.states, config.state_bytes(4), layer.layer_bytes)
    assert groups is not None
    geometry = replace(layer, num_layers=groups.layers, groups=groups)
    return ["--model", str(folder), "--dtype", "float32", "--state-interval", str(INTERVAL)], expected, geometry


def test_prefill_decode_and_store_nodes(start: Start, model, tmp_path):
    """One state is handed over; nodes with empty arenas fetch a prefix and the state at its end, from DRAM and SSD."""
    flags, expected, geometry = model
    ssd = {"store": ["--ssd-path", str(tmp_path / "{node}")]}
    flags = [*flags, "--max-num-batched-tokens", "100", "--prefix-fetch", "always"]
    with start("prefill=1,decode=1,store=1", *flags, role_flags=ssd) as cluster:
        url = cluster["store-0"].url
        answer = complete(url, PROMPTS["page"], NEW_TOKENS, ignore_eos=True)
        (moved,) = events(url, answer, "kv_moved")
        states = 3 * geometry.groups.state_bytes
        assert moved["bytes"] == -(-len(PROMPTS["page"]) // 16) * geometry.block_bytes + states
        assert answers(url) == {case: expected[case] for case in PROMPTS}
        assert answers(url) == {case: expected[case] for case in PROMPTS}  # from the prefix cache
        settled(cluster)

        cluster.restart("prefill-0")  # its arena is empty now; the pool is not
        assert fetched(cluster, "page", expected) == {"dram": (150 - 1) // 16 + geometry.state_blocks}
        assert fetched(cluster, "head", expected) == {"dram": 128 // 16 + geometry.state_blocks}
        for name in ("store-0", "decode-0", "prefill-0"):  # DRAM and arenas are empty: what is left is on SSD
            cluster.restart(name)
        assert fetched(cluster, "chapter", expected) == {"ssd": (331 - 1) // 16 + geometry.state_blocks}
        settled(cluster)


def fetched(cluster: Any, case: str, expected: dict[str, str]) -> dict[str, int]:
    """Blocks of the prefix by tier, after the same answer."""
    url = cluster["decode-0"].url
    answer = complete(url, CASES[case], NEW_TOKENS, ignore_eos=True)
    assert answer["choices"][0]["text"] == expected[case]
    (load,) = events(url, answer, "prefix_fetched")
    tiers: dict[str, int] = load["tiers"]
    return tiers


def test_the_next_turn_goes_on_from_a_state_in_another_arena(start: Start, model):
    """Without a pool: the decode node has the KV of the answer and a state at its last border, and its digest says so
    after a second or two; until then the prefill node computes the answer."""
    flags, _, geometry = model
    with start("prefill=1,decode=1", *flags, "--prefix-fetch", "always") as cluster:
        url, prompt, loads = cluster["prefill-0"].url, list(range(500, 650)), []
        known = (150 - 1) // 16, (150 + 60 - 1) // 16  # blocks on the prefill node, and on the decode node
        wanted = known[1] - known[0] + geometry.state_blocks
        for attempt in range(8):
            chat = {"cache_salt": f"chat {attempt}", "ignore_eos": True}
            answer = complete(url, prompt, 60, return_token_ids=True, **chat)["choices"][0]["token_ids"]
            time.sleep(attempt)
            longer = [*prompt, *answer, 7, 8, 9]
            turn = complete(url, longer, NEW_TOKENS, **chat)
            alone = complete(url, longer, NEW_TOKENS, ignore_eos=True, cache_salt=f"alone {attempt}")
            assert turn["choices"][0]["text"] == alone["choices"][0]["text"]
            loads = [load["tiers"] for load in events(url, turn, "prefix_fetched")]
            if loads == [{"arena": wanted}]:
                break
            # The digest may also tell only the last border of an interval yet.
            assert loads in ([], [{"arena": wanted - known[1] % INTERVAL}])
        assert loads == [{"arena": wanted}]
        settled(cluster)


def test_drafts_that_are_looked_up(start: Start, model):
    """N-grams on a decode node that got its state from a prefill node, then suffixes: the tokens of no speculation,
    whatever is accepted; also in streams whose prefill node or decode node is killed."""
    flags, _, _ = model
    flags = [*flags, "--max-num-batched-tokens", "64"]
    with start("prefill=1,decode=1,store=1", *flags) as cluster:
        url = cluster["store-0"].url
        alone = repeated(url)
        bodies = [body | {"model": model_of(url)} for body in random_bodies(4, 300, TOKENS, 6)]
        calm = asyncio.run(streams(url, bodies, "calm", half_way, lambda: None))
        for method in ("ngram", "suffix"):
            drafts = ("--num-speculative-tokens", "5", "--speculative-length", "fixed")
            cluster.restart("decode-0", "--speculative-method", method, *drafts)
            assert repeated(url) == alone
            state = settled(cluster)["decode-0"]["engine"]["speculation"]
            assert state["method"] == method and 0 < state["accepted_tokens"] < state["draft_tokens"]
        for victim, due in (("decode-0", half_way), ("prefill-0", one_has_begun)):
            cut(cluster, victim, "store-0", bodies, calm, due, least=1)


def repeated(url: str) -> list[str]:
    """Answers of three words in any order, which repeat themselves, all at once."""
    prompts = [[100 + i, 200, 300, 400 + i] * 12 + [500 + i] for i in range(4)]

    def ask(prompt: list[int]) -> str:
        bias = {"200": 100, "300": 100, "700": 100}
        text: str = complete(url, prompt, 60, ignore_eos=True, logit_bias=bias)["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, prompts))


def test_kills_in_the_middle_of_streams(start: Start, model):
    """kill -9 of the only decode node, then of the only prefill node: every stream goes on with the same tokens."""
    flags, _, _ = model
    with start("prefill=1,decode=1,store=1", *flags, "--max-num-batched-tokens", "64") as cluster:
        url = cluster["store-0"].url
        bodies = [body | {"model": model_of(url)} for body in random_bodies(4, 300, TOKENS, 6)]
        calm = asyncio.run(streams(url, bodies, "calm", half_way, lambda: None))
        for victim, due in (("decode-0", half_way), ("prefill-0", one_has_begun)):
            cut(cluster, victim, "store-0", bodies, calm, due, least=1)


def test_a_small_arena(start: Start, model):
    """Three requests, of which not all fit, are preempted and resumed from saved states: the tokens of each alone."""
    flags, expected, geometry = model
    blocks = 24 + 6 * geometry.state_blocks
    small = ("--kv-cache-bytes", str(blocks * geometry.block_bytes), "--max-num-batched-tokens", "32")
    prompts = [list(range(1000 * i, 1000 * i + 150)) for i in range(1, 4)]
    with start("mixed=1", *flags, *small, "--max-model-len", "336", "--dram-bytes", "0") as cluster:
        url = cluster.nodes[0].url
        page = complete(url, PROMPTS["page"], NEW_TOKENS, ignore_eos=True)
        assert page["choices"][0]["text"] == expected["page"]
        chapter = complete(url, PROMPTS["chapter"][:324], NEW_TOKENS, ignore_eos=True)
        assert chapter["usage"]["completion_tokens"] == NEW_TOKENS

        def ask(prompt: list[int]) -> str:
            text: str = complete(url, prompt, 100, ignore_eos=True)["choices"][0]["text"]
            return text

        alone = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(ask, prompts)) == alone
        settled(cluster)
        if geometry.state_blocks > 2:  # Kimi Linear's: a second request finds no room to begin
            return
        open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        metrics = open_url(f"{url}/metrics", timeout=10).read().decode()
        counts = [line for line in metrics.splitlines() if line.startswith("vllm:num_preemptions_total")]
        assert sum(float(line.split()[-1]) for line in counts) > 0


@pytest.mark.heavy
@pytest.mark.parametrize("flags", [("--kv-transfer", "pull"), ("--kv-overlap", "chunk"), ("--kv-overlap", "none")])
def test_every_way_of_a_hand_over(start: Start, model, flags):
    of_model, expected, _ = model
    with start("prefill=1,decode=1", *of_model, *flags, "--max-num-batched-tokens", "40") as cluster:
        assert answers(cluster["decode-0"].url) == {case: expected[case] for case in PROMPTS}
        settled(cluster)
