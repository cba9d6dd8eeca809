"""Families that have no test module of their own here, on the ways of test_same_tokens.py: the greedy tokens of
transformers in float32 after chunks, a hand-over, the prefix cache, the store's DRAM and SSD, preemptions, and the loss
of a node. One cluster per model; most are heavy, because what differs is the model, not the way."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cache.block import BlockGeometry
from engine.checkpoint.model_source import describe
from engine.text.tokenizer import Tokenizer
from lab.faults.client import random_bodies
from lab.launch import rest
from tests.e2e.conftest import Start, complete, model_of, settled
from tests.e2e.test_latent import NEW_TOKENS, PROMPTS, answers, events
from tests.e2e.test_only_node import ATTEMPTS, TOKENS, cut, half_way, streams
from tests.engine.model.test_model import their_greedy
from tests.engine.tiny_families import save

LIGHT = ("deepseek2", "qwen2moe")
NAMES = (*LIGHT, "deepseek2-lite", "kimi-k2", "glm4", "phi3", "olmo2", "granite")
CASES = [pytest.param(name, marks=[] if name in LIGHT else [pytest.mark.heavy]) for name in NAMES]
Saved = tuple[list[str], dict[str, str], BlockGeometry]


def saved(name: str, folder: Path) -> Saved:
    """Flags of a node, the answers of transformers, and the blocks."""
    theirs = save(name, folder, vocab_size=49152, hidden_size=128)  # heads for which the kernels are
    tokenizer = Tokenizer.load(describe("smollm2-135m-instruct"))
    tokenizer.save(folder / "tokenizer.json")
    expected = {
        case: tokenizer.decode(their_greedy(theirs, ids, NEW_TOKENS), skip_special_tokens=True)
        for case, ids in PROMPTS.items()
    }
    config = describe(str(folder)).config
    sizes = config.kv_layers, config.num_kv_heads, config.head_size
    geometry = BlockGeometry(*sizes, 16, "float32", kind=config.kv_kind)
    flags = ["--model", str(folder), "--dtype", "float32", "--calibration-ms", "100", "--prefix-fetch", "always"]
    return [*flags, "--max-num-batched-tokens", "100", "--max-model-len", "400"], expected, geometry


@pytest.mark.parametrize("name", CASES)
def test_every_way(start: Start, tmp_path: Path, name: str):
    folder = tmp_path / "model"
    folder.mkdir()
    flags, expected, geometry = saved(name, folder)
    own = {
        "prefill": ["--kv-cache-bytes", "64M"],
        "decode": ["--kv-cache-bytes", str(44 * geometry.block_bytes)],  # two of the requests below at their end
        "store": ["--ssd-path", str(tmp_path / "{node}")],
    }
    with start("prefill=1,decode=1,store=1", *flags, role_flags=own) as cluster:
        url = cluster["store-0"].url
        answer = complete(url, PROMPTS["page"], NEW_TOKENS, ignore_eos=True)
        (moved,) = events(url, answer, "kv_moved")
        assert moved["bytes"] == -(-len(PROMPTS["page"]) // 16) * geometry.block_bytes
        assert answers(url) == expected
        assert answers(url) == expected  # from the prefix cache
        settled(cluster)
        preempted(cluster)

        full = {case: (len(ids) - 1) // 16 for case, ids in PROMPTS.items()}
        cluster.restart("prefill-0")  # its arena is empty now; the pool is not
        assert fetched(cluster, "page", expected) == {"dram": full["page"]}
        for node in ("store-0", "decode-0", "prefill-0"):  # DRAM and arenas are empty: what is left is on SSD
            cluster.restart(node)
        assert fetched(cluster, "chapter", expected) == {"ssd": full["chapter"]}

        url = cluster["store-0"].url
        bodies = [body | {"model": model_of(url)} for body in random_bodies(2, 60, TOKENS, 6)]
        calm = asyncio.run(streams(url, bodies, "calm", half_way, lambda: None))
        cut(cluster, "decode-0", "store-0", bodies, calm, half_way, least=1)


def preempted(cluster: Any) -> None:
    """Four requests, of which the decode node has room for two at their end: each gets the tokens that it gets
    alone."""
    url = cluster["store-0"].url
    prompts = [list(range(1000 * i, 1000 * i + 150)) for i in range(1, 5)]

    def ask(prompt: list[int]) -> str:
        text: str = complete(url, prompt, 200, ignore_eos=True)["choices"][0]["text"]
        return text

    def count() -> int:
        state: int = rest.get(f"{cluster['decode-0'].url}/debug/state")["engine"]["preemptions"]
        return state

    alone = [ask(prompt) for prompt in prompts]
    before = count()
    for _ in range(ATTEMPTS):  # on a busy machine they may come one after the other
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(ask, prompts)) == alone
        settled(cluster)
        if count() > before:
            return
    raise AssertionError("nothing was preempted")


def fetched(cluster: Any, case: str, expected: dict[str, str]) -> dict[str, int]:
    """Blocks of the prefix by tier, after the same answer."""
    url = cluster["decode-0"].url
    answer = complete(url, PROMPTS[case], NEW_TOKENS, ignore_eos=True)
    assert answer["choices"][0]["text"] == expected[case]
    (load,) = events(url, answer, "prefix_fetched")
    tiers: dict[str, int] = load["tiers"]
    return tiers
