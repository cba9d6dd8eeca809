"""A node with quantized weights gives the tokens of the model with these weights; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention.choice.choose import choose
from attention.cpu.level import levels_here
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import load_quantized
from engine.config.config import EMBEDDED_MODEL
from engine.loading.weight_type import FASTER
from engine.model.decoder import Model
from engine.model.ops.choice import choose_ops
from engine.step.runner import Runner
from lab.launch import rest
from tests.e2e.conftest import Start, complete, settled
from tests.e2e.test_start import run
from tests.engine.checkpoint.test_byte_weights import DEEPSEEK, W8A8
from tests.engine.checkpoint.test_byte_weights import models as stored_and_wide
from tests.engine.checkpoint.test_byte_weights import write as write_checkpoint
from tests.engine.model.test_model import greedy

QUESTION = "What is the capital of France?"
SMALL = ("--max-model-len", "1024", "--kv-cache-bytes", "100M", "--num-threads", "1")
SIZES = (*SMALL, "--dtype", "float32")
BEST = ("--attention-backend", "cpu")
"""The best level of this CPU, without a measurement."""
NEW_TOKENS = 12


def in_process(weight_dtype: str, prompt: list[int]) -> list[int]:
    """What a node with BEST computes, without the node around it. Two of its first tokens are as good as tied (25.33
    and 25.24): `auto`, whose measurement of attention finds another level on a busy machine, decides otherwise."""
    torch.set_num_threads(1)
    source, dtype = describe(EMBEDDED_MODEL), torch.float32
    config = source.config
    ops = choose_ops("cpu", "cpu", dtype, products="groups")
    model = Model(config, load_quantized(source, weight_dtype, dtype), choose("cpu", "cpu"), ops=ops)
    pool = torch.zeros(8, config.num_layers, 2, config.num_kv_heads, 16, config.head_size, dtype=dtype)
    return greedy(Runner(model, pool, 16), prompt, NEW_TOKENS, [len(prompt)], list(range(8)))


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
@pytest.mark.parametrize(
    ("weight_dtype", "kinds"), [("stored", "q4_1 and q8_0"), pytest.param("int8", "q8_0", marks=pytest.mark.heavy)]
)
def test_a_node_answers_as_its_model(start: Start, embedded_tokenizer: Any, weight_dtype, kinds):
    prompt = list(embedded_tokenizer.chat([{"role": "user", "content": QUESTION}]))
    expected = embedded_tokenizer.decode(in_process(weight_dtype, prompt), skip_special_tokens=True)
    with start("mixed=1", *SIZES, *BEST, "--weight-dtype", weight_dtype) as cluster:
        answer = complete(cluster.nodes[0].url, prompt, NEW_TOKENS, ignore_eos=True)
        assert answer["choices"][0]["text"] == expected
        assert f"weight matrices in {kinds}: " in "\n".join(cluster.nodes[0].last_lines(200))
        kernels = rest.get(f"{cluster.nodes[0].url}/debug/state")["engine"]["kernels"]
        assert kernels["products"] == f"our kernels of level {levels_here()[0]}", "not the best of this CPU"
        settled(cluster)


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
@pytest.mark.parametrize(("quantization", "kind"), [(W8A8, "int8"), (DEEPSEEK, "fp8")], ids=["W8A8", "DeepSeek"])
def test_a_checkpoint_in_bytes(start: Start, embedded_tokenizer: Any, tmp_path, quantization, kind):
    """fp8: the tokens of the widened weights. int8: those of the model, whose activations are rounded."""
    folder, _ = write_checkpoint(tmp_path, quantization, vocabulary=49152)
    embedded_tokenizer.save(tmp_path / "tokenizer.json")
    flags = ("--model", folder, "--dtype", "float32", "--max-model-len", "64", "--num-threads", "1", "--weight-dtype")
    prompt = list(range(100, 130))
    runner = Runner(stored_and_wide(folder)[kind == "fp8"], torch.zeros(3, 2, 2, 1, 16, 64), 16)
    expected = embedded_tokenizer.decode(greedy(runner, prompt, NEW_TOKENS, [len(prompt)], [0, 1, 2]))
    with start("mixed=1", *flags, "stored") as cluster:
        answer = complete(cluster.nodes[0].url, prompt, NEW_TOKENS, ignore_eos=True)
        assert answer["choices"][0]["text"] == expected
        assert f"14 weight matrices in {kind}: " in "\n".join(cluster.nodes[0].last_lines(200))
        settled(cluster)


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
def test_stored_weights_work_with_nodes_that_widen_them(start: Start, embedded_tokenizer: Any):
    """They are the same weights: one cluster, KV of one node used by the other."""
    prompt = list(embedded_tokenizer.chat([{"role": "user", "content": QUESTION}]))
    role_flags = {"prefill": ["--weight-dtype", "stored"]}
    with start("prefill=1,decode=1", *SIZES, role_flags=role_flags) as cluster:
        answer = complete(cluster["decode-0"].url, prompt, NEW_TOKENS, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == NEW_TOKENS
        settled(cluster)


@pytest.mark.skipif(levels_here()[:1] == [] or levels_here()[0] not in FASTER, reason="this CPU widens weights")
def test_the_embedded_model_runs_as_stored_unless_a_type_is_named(start: Start, tmp_path):
    """No converted copy is written then. --dtype float32 computes what transformers does: test_same_tokens.py."""
    kept = tmp_path / "weights"
    with start("mixed=1", *SMALL, "--weight-cache", str(kept)) as cluster:
        assert "Paris" in complete(cluster.nodes[0].url, "The capital of France is", 4)["choices"][0]["text"]
        log = "\n".join(cluster.nodes[0].last_lines(200))
        assert "--weight-dtype auto: stored" in log and "weight matrices in q4_1 and q8_0: " in log
        settled(cluster)
    assert not kept.exists()
    with start("mixed=1", *SMALL, "--weight-cache", str(kept), "--dtype", "float32") as cluster:
        log = "\n".join(cluster.nodes[0].last_lines(200))
        assert "--weight-dtype auto: " not in log and "weight matrices in" not in log
    assert list(kept.iterdir())


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
@pytest.mark.parametrize("taken", ["wide", "stored"])
def test_a_joining_node_takes_the_form_of_the_clusters_weights(start: Start, taken):
    """Whatever it would choose itself."""
    with start("mixed=1", *SMALL, "--weight-dtype", taken) as cluster:
        assert rest.get(cluster.nodes[0].url + "/cluster")["weight_dtype"] == taken
        joined = cluster.add("mixed", "--weight-dtype", "auto")
        assert rest.get(joined.url + "/cluster")["weight_dtype"] == taken
        assert f"--weight-dtype auto: {taken}, because the cluster's nodes " in "\n".join(joined.last_lines(200))
        settled(cluster)


def test_other_weights_do_not_join(start: Start, tiny_model):
    with start("store=1", *tiny_model) as cluster:
        door = cluster.nodes[0].url.removeprefix("http://")
        code, told = run(*tiny_model, "--role", "store", "--port", "0", "--join", door, "--weight-dtype", "int8")
        assert code == 2 and "start this node with the same model, --weight-dtype" in told.splitlines()[-1]


def test_stored_needs_a_gguf_file(tiny_model):
    code, told = run(*tiny_model, "--port", "0", "--weight-dtype", "stored")
    assert code == 2 and "Traceback" not in told
    assert "--weight-dtype stored: " in told and "is not a GGUF file, nor " in told.splitlines()[-1]
