"""Real clusters that speculate say what clusters say that do not, and give everything back."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import Start, complete, settled

PROMPTS = [[100 + i, 200, 300, 400 + i] * 12 + [500 + i] for i in range(4)]
K = ("--num-speculative-tokens", "5", "--speculative-length", "fixed")
NGRAM = ("--speculative-method", "ngram", *K)


def answers(url: str, **body: Any) -> list[str]:
    """All prompts at once."""

    def ask(ids: list[int]) -> str:
        choice = complete(url, ids, 40, ignore_eos=True, **body)["choices"][0]
        assert choice["finish_reason"] == "length"
        return choice["text"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


@pytest.fixture(scope="module")
def alone(start: Start, tiny_model) -> list[list[str]]:
    with start("mixed=1", *tiny_model) as cluster:
        url = cluster.nodes[0].url
        return [answers(url), answers(url, temperature=1.0, seed=7)]


def accepted(cluster: Any, name: str) -> int:
    """Accepted draft tokens by /debug/state, which /metrics must repeat."""
    speculation = settled(cluster)[name]["engine"]["speculation"]
    assert speculation["requests"] == 0
    with urllib.request.urlopen(f"{cluster[name].url}/metrics", timeout=10) as page:
        text = page.read().decode()
    value = next(line for line in text.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total"))
    assert float(value.rpartition(" ")[2]) == speculation["accepted_tokens"]
    return speculation["accepted_tokens"]


def test_ngrams_and_then_a_draft_model_on_a_decode_node(start: Start, tiny_model, alone):
    """The draft model is the model itself: its KV of the prompt is not what the prefill node pushed, yet every draft is
    right."""
    draft = ("--speculative-method", "draft", "--speculative-model", tiny_model[1], "--speculative-kv-bytes", "8M", *K)
    with start("prefill=1,decode=1", *tiny_model, role_flags={"decode": NGRAM}) as cluster:
        url = cluster["decode-0"].url
        assert [answers(url), answers(url, temperature=1.0, seed=7)] == alone
        assert accepted(cluster, "decode-0") > 0

        url = cluster.restart("decode-0", *draft).url
        assert [answers(url), answers(url, temperature=1.0, seed=7)] == alone
        assert accepted(cluster, "decode-0") > 0
        state = settled(cluster)["decode-0"]["engine"]
        assert state["speculation"]["method"] == "draft" and state["speculation"]["acceptance_rate"] == 1.0
        assert state["draft_model"]["blocks"]["held"] == 0
        assert state["draft_model"]["prompt_tokens"] == 2 * sum(map(len, PROMPTS)), "again for each request"


def test_ngrams_over_int8_on_a_decode_node_and_on_one_node(start: Start, tiny_model):
    """One request at a time: then both compute the same shapes, see docs/failures.md."""
    flags = (*tiny_model, "--kv-cache-dtype", "int8", *NGRAM)
    found = []
    for nodes in ("mixed=1", "prefill=1,decode=1"):
        with start(nodes, *flags) as cluster:
            node = cluster.nodes[-1]
            asked = [complete(node.url, ids, 40, ignore_eos=True) for ids in PROMPTS]
            found.append([one["choices"][0]["text"] for one in asked])
            assert accepted(cluster, node.name) > 0
    assert found[0] == found[1]
