"""The same greedy tokens however the work is spread: the embedded model in float32 against transformers, whose answers
are kept in a file (tests/transformers_answers.py).

One cluster at a time; what is compared is the text of token-id prompts, so nothing hides in re-tokenising.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import transformers_answers
from tests.e2e.conftest import Start, complete, settled, timeline
from tests.transformers_answers import NEW_TOKENS, PROMPTS, SCORED

F32 = ("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-bytes", "400M")


@pytest.fixture(scope="module")
def prompts(embedded_tokenizer: Any) -> dict[str, list[int]]:
    return {name: embedded_tokenizer.encode(text) for name, text in PROMPTS.items()}


@pytest.fixture(scope="module")
def expected(embedded_tokenizer: Any) -> dict[str, str]:
    return {
        name: embedded_tokenizer.decode(entry["tokens"], skip_special_tokens=True)
        for name, entry in transformers_answers.answers().items()
    }


def answers(url: str, prompts: dict[str, list[int]]) -> dict[str, str]:
    return {name: complete(url, ids, NEW_TOKENS)["choices"][0]["text"] for name, ids in prompts.items()}


@pytest.mark.parametrize(
    "flags",
    [
        ("--block-size", "32", "--max-num-batched-tokens", "200"),
        pytest.param(("--no-enable-prefix-caching",), marks=pytest.mark.heavy),
    ],
)
def test_mixed_node(start: Start, prompts, expected, flags):
    with start("mixed=1", *F32, *flags) as cluster:
        url = cluster.nodes[0].url
        assert answers(url, prompts) == expected
        assert answers(url, prompts) == expected  # once more: from the prefix cache, or without it
        cached = complete(url, prompts["page"], 1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == ("--no-enable-prefix-caching" not in flags)
        settled(cluster)


def test_prefix_from_this_nodes_dram(start: Start, prompts, expected):
    """An arena of one context: the second prompt evicts the first, whose blocks come back from the DRAM share."""
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-bytes", "46M", "--block-size", "64")
    with start("mixed=1", *flags) as cluster:
        url = cluster.nodes[0].url
        assert answers(url, prompts) == expected
        settled(cluster)
        other = list(range(1000, 2010))  # the whole arena
        complete(url, other, 1)
        settled(cluster)
        answer = complete(url, prompts["page"], NEW_TOKENS)
        assert answer["choices"][0]["text"] == expected["page"]
        events = timeline(url, answer["id"])["events"]
        assert [e["detail"]["tiers"] for e in events if e["event"] == "prefix_fetched"] == [
            {"dram": (len(prompts["page"]) - 1) // 64}
        ]


def test_prefill_decode_and_store_nodes(start: Start, prompts, expected, tmp_path):
    """Disaggregated; the prompt's own log probabilities; then the prefix from the store's DRAM, and from its LMDB after
    a restart."""
    ssd = {"store": ["--ssd-path", str(tmp_path / "{node}")]}
    with start("prefill=1,decode=1,store=1", *F32, role_flags=ssd) as cluster:
        assert answers(cluster["decode-0"].url, prompts) == expected
        settled(cluster)
        for name in SCORED:  # after it was cached everywhere
            check_scores(cluster["decode-0"].url, prompts[name], transformers_answers.answers()[name])
        first = complete(cluster["store-0"].url, prompts["page"], NEW_TOKENS)
        summary = timeline(cluster["store-0"].url, first["id"])["summary"]
        assert summary["nodes"] == {"acceptor": "store-0", "prefill": "prefill-0", "decode": "decode-0"}
        assert list(summary["bytes_moved"]) == ["shm"], "what nodes of one host take by themselves"

        cluster.restart("prefill-0")  # its arena is empty now; the pool is not
        tiers, ssd_tokens = fetched(cluster, prompts["page"], expected["page"])
        assert tiers == {"dram": (len(prompts["page"]) - 1) // 16} and not ssd_tokens

        cluster.restart("store-0")  # its DRAM is empty too: what is left is in LMDB
        cluster.restart("decode-0")  # and so is its arena
        cluster.restart("prefill-0")
        tiers, ssd_tokens = fetched(cluster, prompts["chapter"], expected["chapter"])
        assert tiers == {"ssd": (len(prompts["chapter"]) - 1) // 16}
        assert ssd_tokens == 16 * tiers["ssd"], "the placement knew it"
        settled(cluster)
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stored and not [path for path in stored if path.stat().st_mode & 0o077], "KV is for its own user"


def check_scores(url: str, prompt: list[int], expected: dict[str, Any]) -> None:
    """Echo with log probabilities, with and without tokens behind the prompt, against transformers."""
    alone = complete(url, prompt, 0, echo=True, logprobs=2)
    behind = complete(url, prompt, 2, echo=True, logprobs=2)
    assert alone["usage"]["completion_tokens"] == 0 and alone["usage"]["prompt_tokens"] == len(prompt)
    assert behind["choices"][0]["text"].startswith(alone["choices"][0]["text"])
    for answer, more in ((alone, 0), (behind, 2)):
        logprobs = answer["choices"][0]["logprobs"]
        assert [len(column) for column in logprobs.values()] == [len(prompt) + more] * 4
        found = logprobs["token_logprobs"]
        assert found[0] is None and logprobs["top_logprobs"][0] is None
        assert found[1 : len(prompt)] == pytest.approx(expected["logprobs"], abs=2e-3)
        best = [max(top.values()) for top in logprobs["top_logprobs"][1 : len(prompt)]]
        assert best == pytest.approx(expected["best"], abs=2e-3)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def fetched(cluster: Any, prompt: list[int], text: str) -> tuple[dict[str, int], int]:
    """Ask, check the text, and return how many blocks of the prefix came from which tier, and how many tokens the
    placement expected from SSD."""
    url = cluster["decode-0"].url
    answer = complete(url, prompt, NEW_TOKENS)
    assert answer["choices"][0]["text"] == text
    told = timeline(url, answer["id"])
    assert list(told["summary"]["bytes_moved"]) == ["shm"]
    loads = [event["detail"]["tiers"] for event in told["events"] if event["event"] == "prefix_fetched"]
    assert len(loads) == 1, told["events"]
    rows = [row for row in told["decisions"][-1]["considered"] if row["stage"] == "prefill"]
    return loads[0], rows[0]["ssd_tokens"]
