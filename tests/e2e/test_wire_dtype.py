"""KV in one byte per element between prefill and decode node (--wire-dtype): the tokens of one model whose KV of the
prompt went through the same encoding."""

from __future__ import annotations

import urllib.request

import pytest
import torch

from attention.choice.choose import choose
from attention.codes import DTYPES
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.model.decoder import Model
from engine.sampling.logit_rules import SamplingRow
from engine.step.inputs import Row
from engine.step.request import SamplingParams
from engine.step.runner import Runner
from lab.launch import rest
from sched.cost import TransferModel
from tests.e2e.conftest import TINY, Start, complete, settled, timeline

PROMPT = list(range(3000, 3330))
CHUNK, COUNT = 100, 24  # chunks end inside blocks
FLAGS = ("--max-num-batched-tokens", str(CHUNK), "--no-enable-prefix-caching")
WAYS = {
    "int8": [("push", "layer", "shm"), ("push", "none", "tcp"), ("pull", "layer", "tcp"), ("pull", "chunk", "shm")],
    "fp8": [("push", "chunk", "tcp"), ("pull", "none", "shm")],
}


def geometry_of(wire_dtype: str) -> BlockGeometry:
    return BlockGeometry(TINY["num_hidden_layers"], TINY["num_key_value_heads"], 16, 16, "float32", "", wire_dtype)


def one_model(folder: str, wire_dtype: str) -> list[int]:
    """The first token comes from KV as it was computed, the others from what the encoding leaves of the prompt's KV
    and from their own as it is."""
    geometry, source = geometry_of(wire_dtype), describe(folder, "dummy")
    model = Model(source.config, weights.load(source, torch.float32), choose("auto", "cpu", 16, "float32"))
    blocks = list(range(-(-(len(PROMPT) + COUNT) // 16)))
    kv = torch.zeros(len(blocks), *geometry.shape)
    runner, known, done = Runner(model, kv, 16), list(PROMPT), 0
    while len(known) < len(PROMPT) + COUNT:
        end = min(len(known), done + CHUNK)
        sample = SamplingRow(SamplingParams(temperature=0), known, len(PROMPT)) if end == len(known) else None
        (sampled,) = runner.step([Row(known[done:end], done, blocks, sample)])
        if end == len(PROMPT) and geometry.wire_encoded:
            codes = torch.empty(geometry.encoded_bytes, dtype=torch.uint8)
            for block in kv[: -(-len(PROMPT) // 16)]:
                encode_block(block, DTYPES[wire_dtype], codes)
                decode_block(codes, DTYPES[wire_dtype], block)
        known, done = known + [token.token_id for token in sampled], end
    return known[len(PROMPT) :]


@pytest.mark.parametrize("wire_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.heavy)])
def test_the_tokens_of_one_model_behind_the_same_encoding(start: Start, tiny_model, embedded_tokenizer, wire_dtype):
    geometry = geometry_of(wire_dtype)
    plain, tokens = (one_model(tiny_model[1], dtype) for dtype in ("", wire_dtype))
    assert plain[0] == tokens[0] and plain != tokens, "a prompt for which the encoding shows"
    wanted = embedded_tokenizer.decode(tokens, skip_special_tokens=True)
    nodes = "prefill=1,decode=1"
    first = {"prefill": flags_of(*WAYS[wire_dtype][0])}
    with start(nodes, *tiny_model, *FLAGS, "--wire-dtype", wire_dtype, role_flags=first) as cluster:
        url, prefill = cluster["decode-0"].url, cluster["prefill-0"].url
        assert rest.get(url + "/cluster")["wire_dtype"] == wire_dtype
        for i, (how, overlap, transport) in enumerate(WAYS[wire_dtype]):
            if i:
                prefill = cluster.restart("prefill-0", *flags_of(how, overlap, transport)).url
            answer = complete(url, PROMPT, COUNT, ignore_eos=True)
            assert answer["choices"][0]["text"] == wanted, (how, overlap)
            record = timeline(url, answer["id"])
            if not i:  # nothing was measured yet: the estimate is that of the prior
                estimated = record["decisions"][0]["estimates"]["handover_s"]
                assert estimated == pytest.approx(TransferModel().estimate(len(PROMPT) * geometry.wire_bytes / 16))
            (moved,) = [e["detail"] for e in record["events"] if e["event"] == "kv_moved"]
            assert [moved[name] for name in ("how", "overlap", "transport")] == [how, overlap, transport]
            assert moved["wire_dtype"] == wire_dtype
            saved = geometry.layer_bytes - geometry.encoded_layer_bytes
            assert moved["saved_bytes"] * geometry.encoded_layer_bytes == moved["bytes"] * saved
            if overlap == "none":
                assert moved["bytes"] == -(-len(PROMPT) // 16) * geometry.encoded_bytes
            assert saved_by(prefill) == moved["saved_bytes"]
            settled(cluster)


def flags_of(how: str, overlap: str, transport: str) -> list[str]:
    """shm is what nodes of one host take by themselves."""
    return ["--kv-transfer", how, "--kv-overlap", overlap, "--transport", "auto" if transport == "shm" else transport]


def saved_by(url: str) -> float:
    """By the metrics of the node, since its start."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("mooncake:wire_saved_bytes_total")]
    return float(line.split()[-1])
