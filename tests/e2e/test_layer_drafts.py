"""--speculative-method mtp and eagle on real processes, on every way of test_same_tokens.py: a constructed tiny
DeepSeek-V3 whose layer that drafts is mostly right as long as it has the KV of the tokens before
(tests/engine/tiny_mtp.py), and a Mistral with such a head (tests/engine/tiny_eagle.py). The tokens are those of
transformers without speculation."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache.block import BlockGeometry
from engine.checkpoint.model_source import describe
from engine.text.tokenizer import Tokenizer
from lab.faults.client import random_bodies
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import SMALL, Start, complete, model_of, settled
from tests.e2e.test_latent import events
from tests.e2e.test_only_node import TOKENS, cut, half_way, streams
from tests.e2e.test_speculation import accepted
from tests.e2e.test_start import run
from tests.engine import tiny_eagle, tiny_mtp
from tests.engine.model.test_model import their_greedy

GEOMETRIES = {
    "mtp": BlockGeometry(2, 1, 48, 16, "float32", kind="latent"),
    "eagle": BlockGeometry(4, 2, 32, 16, "float32"),
}
"""The layers of the model, and the one that drafts."""

PROMPTS = {"short": list(range(100, 105)), "page": list(range(300, 450)), "chapter": list(range(2000, 2331))}
NEW_TOKENS = 24
FIXED = ("--speculative-length", "fixed", "--speculative-acceptance", "same-draw")
SEED = 6

WITH_DRAFTS = 20
"""Tokens of an answer that goes on, at least: enough for drafts. The first two come from the prefill node and from a
step without a draft."""


@dataclass(frozen=True)
class Model:
    flags: list[str]
    drafting: list[str]
    geometry: BlockGeometry
    expected: dict[str, str]  # the answers of transformers


@pytest.fixture(scope="module", params=["mtp", "eagle"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp(request.param)
    theirs = {"mtp": tiny_mtp, "eagle": tiny_eagle}[request.param].save_agreeing(folder, vocab_size=49152)
    tokenizer = Tokenizer.load(describe("smollm2-135m-instruct"))
    tokenizer.save(folder / "tokenizer.json")
    expected = {
        name: tokenizer.decode(their_greedy(theirs, ids, NEW_TOKENS), skip_special_tokens=True)
        for name, ids in PROMPTS.items()
    }
    head = ["--speculative-model", str(folder / "head")] if request.param == "eagle" else []
    drafting = ["--speculative-method", request.param, *FIXED, *head]
    flags = ["--model", str(folder), "--dtype", "float32", *SMALL]
    return Model(flags, drafting, GEOMETRIES[request.param], expected)


def answer(url: str, name: str, expected: dict[str, str]) -> dict[str, Any]:
    found = complete(url, PROMPTS[name], NEW_TOKENS, ignore_eos=True)
    assert found["choices"][0]["text"] == expected[name]
    return found


def rate(cluster: LocalCluster) -> float:
    """Of accepted draft tokens on the decode node, which /metrics counts too, since its start."""
    assert accepted(cluster, "decode-0") > 0
    speculation = settled(cluster)["decode-0"]["engine"]["speculation"]
    assert speculation["method"] in ("mtp", "eagle")
    found: float = speculation["acceptance_rate"]
    return found


def test_prefill_decode_and_store_nodes(start: Start, model: Model, tmp_path):
    """Chunks, a push, the store's DRAM, its SSD: the layer's KV comes every way, because drafts are right. Then the
    decode node is killed with -9 under streams, greedy and drawn, and started again."""
    flags, expected, geometry = model.flags, model.expected, model.geometry
    ssd = {"store": ["--ssd-path", str(tmp_path / "{node}")]}
    with start(
        "prefill=1,decode=1,store=1",
        *(*flags, *model.drafting, "--max-num-batched-tokens", "100", "--prefix-fetch", "always"),
        role_flags=ssd,
    ) as cluster:
        url = cluster["store-0"].url
        (moved,) = events(url, answer(url, "page", expected), "kv_moved")
        assert moved["bytes"] == -(-len(PROMPTS["page"]) // 16) * geometry.block_bytes
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda name: answer(url, name, expected), PROMPTS))
        assert rate(cluster) > 0.5
        settled(cluster)  # what is still to be published would die with its node

        for name, tier in (("page", "dram"), ("chapter", "ssd")):
            lost = ("prefill-0", "decode-0") if tier == "dram" else ("store-0", "decode-0", "prefill-0")
            for node in lost:
                cluster.restart(node)
            url = cluster["decode-0"].url
            (load,) = events(url, answer(url, name, expected), "prefix_fetched")
            assert load["tiers"] == {tier: (len(PROMPTS[name]) - 1) // 16}
            assert load["bytes"] == (len(PROMPTS[name]) - 1) // 16 * geometry.pool_bytes
            assert rate(cluster) > 0.5

        print(f"seed {SEED}")
        url = cluster["store-0"].url
        bodies = [body | {"model": model_of(url)} for body in random_bodies(4, 60, TOKENS, SEED)]
        calm = asyncio.run(streams(url, bodies, "calm", half_way, lambda: None))
        cut(cluster, "decode-0", "store-0", bodies, calm, half_way, least=WITH_DRAFTS)
        assert rate(cluster) > 0.3  # of requests that went on there


def test_preemption_in_a_small_arena(start: Start, model: Model):
    """Four requests of 8 blocks in 16; and the same tokens as each gets alone without speculation."""
    flags = model.flags
    small = (
        "--kv-cache-bytes",
        str(16 * model.geometry.block_bytes),
        "--max-model-len",
        "128",
        "--no-enable-prefix-caching",
    )
    prompts = [list(range(1000 * i, 1000 * i + 64)) for i in range(1, 5)]

    def ask(url: str, prompt: list[int]) -> str:
        text: str = complete(url, prompt, 60, ignore_eos=True)["choices"][0]["text"]
        return text

    with start("mixed=1", *flags) as cluster:
        alone = [ask(cluster.nodes[0].url, prompt) for prompt in prompts]
    with start("mixed=1", *flags, *model.drafting, *small) as cluster:
        url = cluster.nodes[0].url
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda prompt: ask(url, prompt), prompts)) == alone
        state = settled(cluster)[cluster.nodes[0].name]["engine"]
        assert state["preemptions"] > 0 and state["speculation"]["accepted_tokens"] > 0


def test_all_nodes_have_it_or_none(start: Start, model: Model):
    flags = model.flags
    with start("store=1", *flags, *model.drafting) as cluster:
        door = cluster.nodes[0].url.removeprefix("http://")
        code, told = run(*flags, "--role", "store", "--port", "0", "--join", door)
        assert code == 2 and "--speculative-method mtp or eagle only if the cluster has it" in told.splitlines()[-1]


def test_a_model_without_the_layer_is_refused(tiny_model):
    code, told = run(*tiny_model, "--port", "0", "--speculative-method", "mtp")
    assert code == 2 and "Traceback" not in told
    assert "has no num_nextn_predict_layers" in told.splitlines()[-1]
