"""A model with a latent instead of K and V (a tiny DeepSeek-V3) on every way of test_same_tokens.py: the greedy tokens
of transformers in float32, after chunks, a push, the tiers, preemptions, and the loss of a node."""

from __future__ import annotations

import asyncio
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.block import BlockGeometry
from engine.checkpoint.model_source import describe
from engine.text.tokenizer import Tokenizer
from lab.faults.client import random_bodies
from tests.e2e.conftest import SMALL, Start, complete, model_of, settled, timeline
from tests.e2e.test_only_node import TOKENS, cut, half_way, streams
from tests.engine.model.test_model import their_greedy
from tests.engine.tiny_families import save

GEOMETRY = BlockGeometry(4, 1, 48, 16, "float32", kind="latent")
PROMPTS = {"short": list(range(100, 105)), "page": list(range(300, 450)), "chapter": list(range(2000, 2331))}
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    """Flags of a node, and the answers of transformers."""
    folder: Path = tmp_path_factory.mktemp("latent")
    theirs = save("deepseek3", folder, vocab_size=49152)
    tokenizer = Tokenizer.load(describe("smollm2-135m-instruct"))
    tokenizer.save(folder / "tokenizer.json")
    expected = {
        name: tokenizer.decode(their_greedy(theirs, ids, NEW_TOKENS), skip_special_tokens=True)
        for name, ids in PROMPTS.items()
    }
    return ["--model", str(folder), "--dtype", "float32", *SMALL], expected


def answers(url: str) -> dict[str, str]:
    return {
        name: complete(url, ids, NEW_TOKENS, ignore_eos=True)["choices"][0]["text"] for name, ids in PROMPTS.items()
    }


def events(url: str, answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [each["detail"] for each in timeline(url, answer["id"])["events"] if each["event"] == name]


def test_prefill_decode_and_store_nodes(start: Start, latent_model, tmp_path):
    """Chunks, a push of latent rows alone, the store's DRAM, its SSD; then the decode node is lost mid-stream. The
    prefill node computes keys and values of heads, the decode node does not."""
    flags, expected = latent_model
    own = {
        "prefill": ["--latent-prompts", "heads"],
        "decode": ["--latent-prompts", "absorbed"],
        "store": ["--ssd-path", str(tmp_path / "{node}")],
    }
    with start("prefill=1,decode=1,store=1", *flags, "--max-num-batched-tokens", "100", role_flags=own) as cluster:
        url = cluster["store-0"].url
        answer = complete(url, PROMPTS["page"], NEW_TOKENS, ignore_eos=True)
        (moved,) = events(url, answer, "kv_moved")
        assert moved["bytes"] == -(-len(PROMPTS["page"]) // 16) * GEOMETRY.block_bytes
        assert answers(url) == expected
        settled(cluster)

        cluster.restart("prefill-0")  # its arena is empty now; the pool is not
        assert fetched(cluster, "page", expected) == {"dram": (len(PROMPTS["page"]) - 1) // 16}
        for name in ("store-0", "decode-0", "prefill-0"):  # DRAM and arenas are empty: what is left is on SSD
            cluster.restart(name)
        assert fetched(cluster, "chapter", expected) == {"ssd": (len(PROMPTS["chapter"]) - 1) // 16}

        url = cluster["store-0"].url
        bodies = [body | {"model": model_of(url)} for body in random_bodies(4, 60, TOKENS, 6)]
        calm = asyncio.run(streams(url, bodies, "calm", half_way, lambda: None))
        cut(cluster, "decode-0", "store-0", bodies, calm, half_way, least=1)


def fetched(cluster: Any, name: str, expected: dict[str, str]) -> dict[str, int]:
    """Blocks of the prefix by tier, after the same answer."""
    url = cluster["decode-0"].url
    answer = complete(url, PROMPTS[name], NEW_TOKENS, ignore_eos=True)
    assert answer["choices"][0]["text"] == expected[name]
    (load,) = events(url, answer, "prefix_fetched")
    tiers: dict[str, int] = load["tiers"]
    return tiers


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (("--kv-cache-dtype", "int8"), {"dtype": "int8"}),
        (("--wire-dtype", "int8", "--pool-dtype", "fp8"), {"wire_dtype": "int8", "pool_dtype": "fp8"}),
    ],
    ids=["arena", "wire, pool"],
)
def test_quantized_rows_go_everywhere(start: Start, latent_model, flags, changes):
    """Pushed in their bytes, then fetched from the pool by a node whose arena is empty. The first token is far enough
    from a tie to survive the roundings."""
    model, expected = latent_model
    codes = replace(GEOMETRY, **changes)
    blocks = -(-len(PROMPTS["page"]) // 16)
    with start("prefill=1,decode=1,store=1", *model, *flags) as cluster:
        url = cluster["decode-0"].url
        answer = complete(url, PROMPTS["page"], NEW_TOKENS, ignore_eos=True)
        (moved,) = events(url, answer, "kv_moved")
        assert moved["bytes"] == blocks * codes.wire_bytes
        settled(cluster)
        cluster.restart("prefill-0")
        again = complete(url, PROMPTS["page"], NEW_TOKENS, ignore_eos=True)
        (load,) = events(url, again, "prefix_fetched")
        assert load["tiers"] == {"dram": blocks - 1} and load["bytes"] == (blocks - 1) * codes.pool_bytes
        for text in (answer["choices"][0]["text"], again["choices"][0]["text"]):
            assert text[0] == expected["page"][0]
        settled(cluster)


def test_preemption_in_a_small_arena(start: Start, latent_model):
    """Four requests of 8 blocks in 16: their tokens are those that each gets alone."""
    flags, _ = latent_model
    small = ("--kv-cache-bytes", str(16 * GEOMETRY.block_bytes), "--max-model-len", "128")
    prompts = [list(range(1000 * i, 1000 * i + 64)) for i in range(1, 5)]  # three fit until they have 16 tokens more
    with start("mixed=1", *flags, *small, "--no-enable-prefix-caching") as cluster:
        url = cluster.nodes[0].url

        def ask(prompt: list[int]) -> str:
            text: str = complete(url, prompt, 60, ignore_eos=True)["choices"][0]["text"]
            return text

        alone = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(ask, prompts)) == alone
        open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        metrics = open_url(f"{url}/metrics", timeout=10).read().decode()
        counts = [line for line in metrics.splitlines() if line.startswith("vllm:num_preemptions_total")]
        assert sum(float(line.split()[-1]) for line in counts) > 0
        settled(cluster)
