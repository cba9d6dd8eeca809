"""A node with quantized weights: real answers, a cluster of several kinds of weights, what it refuses."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Start, complete, settled
from tests.e2e.test_start import run

QUESTION = "What is the capital of France?"
SIZES = ("--max-model-len", "1024", "--kv-cache-bytes", "100M", "--num-threads", "1")


def answer(url: str, tokenizer) -> str:
    prompt = list(tokenizer.chat([{"role": "user", "content": QUESTION}]))
    return complete(url, prompt, 8)["choices"][0]["text"]


@pytest.mark.parametrize("flags", [("stored",), ("int8", "--dtype", "float32")], ids=lambda flags: flags[0])
def test_a_node_with_quantized_weights_answers(start: Start, embedded_tokenizer, flags):
    with start("mixed=1", *SIZES, "--weight-dtype", *flags) as cluster:
        assert answer(cluster.nodes[0].url, embedded_tokenizer).startswith("The capital of France is Paris.")
        log = "\n".join(cluster.nodes[0].last_lines(200))
        assert f"weight matrices in {'q4_1 and q8_0' if flags[0] == 'stored' else 'q8_0'}: " in log
        settled(cluster)


def test_stored_weights_work_with_nodes_that_widen_them(start: Start, embedded_tokenizer):
    """They are the same weights: one cluster, KV of one node used by the other."""
    role_flags = {"prefill": ["--weight-dtype", "stored"]}
    with start("prefill=1,decode=1", *SIZES, "--dtype", "float32", role_flags=role_flags) as cluster:
        assert answer(cluster["decode-0"].url, embedded_tokenizer).startswith("The capital of France is Paris.")
        settled(cluster)


def test_other_weights_do_not_join(start: Start, tiny_model):
    with start("store=1", *tiny_model) as cluster:
        door = cluster.nodes[0].url.removeprefix("http://")
        code, told = run(*tiny_model, "--role", "store", "--port", "0", "--join", door, "--weight-dtype", "int8")
        assert code == 2 and "start this node with the same model and --weight-dtype" in told.splitlines()[-1]


def test_stored_needs_a_gguf_file(tiny_model):
    code, told = run(*tiny_model, "--port", "0", "--weight-dtype", "stored")
    assert code == 2 and "Traceback" not in told
    assert "--weight-dtype stored: " in told and "is not a GGUF file; use int8, int4 or auto" in told.splitlines()[-1]
