"""Every family against transformers: tiny random models, saved by it, read by our loader.

float32: equal logits for whole prompts, chunks, decodes and batches, and equal greedy tokens. bfloat16: rounding
differs between implementations, its size must not.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.model.decoder import Between
from engine.model.model_config import ModelConfig
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.step.layer_blocks import read_layer, write_layer
from engine.step.runner import Row, Runner
from tests.engine.model.test_model import TOLERANCE, blocks_for, greedy, their_greedy, tokens
from tests.engine.tiny_families import FAMILIES, ours, save
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of

LENGTH, NEW = 70, 8  # tokens: several blocks and several windows


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, save(request.param, directory, "60KB"), directory


def their_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def chunked(runner: Runner, ids: list[int], chunks: list[int]) -> Tensor:
    done, parts = 0, []
    for size in chunks:
        parts.append(logits_of(runner, [Row(ids[done : done + size], done, blocks_for(len(ids)))]))
        done += size
    return torch.cat(parts)


def test_logits_and_tokens_equal_transformers(saved):
    _, theirs, directory = saved
    ids = tokens(LENGTH)
    truth = their_logits(theirs, ids)
    source, runner = ours(directory)
    assert len(source.files) > 1
    for chunks in ([LENGTH], [16, 30, 1, 1, 22]):
        torch.testing.assert_close(chunked(runner, ids, chunks), truth, **TOLERANCE)
    assert greedy(ours(directory)[1], ids, NEW, [40, 30], blocks_for(LENGTH + NEW)) == their_greedy(theirs, ids, NEW)


def test_stages_of_a_pipeline_compute_what_one_node_computes(saved):
    """Each stage with a pool of its own, which has only its layers; chunks as a pipeline cuts them."""
    _, _, directory = saved
    _, whole = ours(directory)
    ids, num_layers = tokens(LENGTH), whole.model.config.num_layers
    sample = SamplingRow(SamplingParams(temperature=0), list(ids), LENGTH)
    blocks = blocks_for(LENGTH + 1)
    for done, size in ((0, 32), (32, LENGTH - 32)):
        row = Row(ids[done : done + size], done, blocks, sample if done else None)
        (alone,) = whole.step([row])
    cuts = [0, 1, num_layers]
    stages = [(range(a, b), ours(directory)[1]) for a, b in pairwise(cuts)]
    chosen = []
    for done, size in ((0, 32), (32, LENGTH - 32)):
        hidden, reported = None, []
        for layers, runner in stages:
            row = Row(ids[done : done + size], done, blocks, sample if done and layers.stop == num_layers else None)
            hidden, chosen = runner.step_part(row, layers, hidden, reported.append)
        assert hidden is None and reported == list(range(num_layers))
    assert [one.token_id for one in chosen] == [one.token_id for one in alone]
    for layers, runner in stages:
        for layer in layers:
            torch.testing.assert_close(runner.kv_pool[blocks, layer], whole.kv_pool[blocks, layer], equal_nan=True)


def test_nodes_that_divide_the_tokens_compute_what_one_node_computes(saved):
    """Each with a pool of its own; the KV of a layer of the others' chunks is put there before its attention."""
    _, _, directory = saved
    _, whole = ours(directory)
    ids, num_layers = tokens(LENGTH), whole.model.config.num_layers
    sample, blocks = SamplingRow(SamplingParams(temperature=0), list(ids), LENGTH), blocks_for(LENGTH + 1)
    cuts = [0, 16, 32, 48, LENGTH]
    for begin, end in pairwise(cuts):
        (alone,) = whole.step([Row(ids[begin:end], begin, blocks, sample if end == LENGTH else None)])
    nodes, others = [ours(directory)[1] for _ in range(2)], [blocks, blocks_for(LENGTH + 1, first=1)]
    sent: dict[int, list[tuple[int, Tensor]]] = {layer: [] for layer in range(num_layers)}
    for chunk, (begin, end) in enumerate(pairwise(cuts)):
        node, own = nodes[chunk % 2], others[chunk % 2]

        def before_layer(layer: int) -> None:
            for start, data in sent[layer]:
                write_layer(node.kv_pool, layer, own[start // BLOCK_SIZE :][: len(data)], data)  # noqa: B023

        def on_layer(layer: int) -> None:
            sent[layer].append((begin, read_layer(node.kv_pool, layer, own[begin // BLOCK_SIZE : end // BLOCK_SIZE])))  # noqa: B023

        row = Row(ids[begin:end], begin, own, sample if end == LENGTH else None)
        (chosen,) = node.step([row], on_layer, before_layer)
    assert [one.token_id for one in chosen] == [one.token_id for one in alone]


def test_a_part_that_ends_wherever_it_may_computes_the_same(saved):
    """Steps of other prompts in between, in the same pool: the KV too is the same to the last bit."""
    _, _, directory = saved
    ids, other = tokens(LENGTH), tokens(24, seed=5)
    sample, blocks = SamplingRow(SamplingParams(temperature=0), list(ids), LENGTH), blocks_for(LENGTH + 1)
    others = blocks_for(25, first=1)
    found = []
    for cut in (False, True):
        _, runner = ours(directory)
        num_layers, pauses = runner.model.config.num_layers, list[tuple[int, bool]]()
        for done, size in ((0, 32), (32, LENGTH - 32)):
            row = Row(ids[done : done + size], done, blocks, sample if done else None)
            hidden, reported = None, list[int]()
            for part in (range(1), range(1, num_layers)):
                left = part
                while True:
                    asked = iter([True])
                    hidden, chosen = runner.step_part(
                        row,
                        left,
                        hidden,
                        reported.append,
                        lambda layer: not cut or next(asked, False),  # noqa: B023
                    )
                    if not isinstance(hidden, Between):
                        break
                    assert not chosen
                    pauses.append((hidden.layer, hidden.attended))
                    left = range(hidden.layer, part.stop)
                    runner.step([Row(other, 0, others)])
            assert reported == list(range(num_layers))
        each = [(layer, attended) for layer in range(num_layers) for attended in (False, True)]
        assert pauses == (2 * [one for one in each if one not in ((0, False), (1, False))] if cut else [])
        found.append(([one.token_id for one in chosen], runner.kv_pool[blocks]))
    assert found[0][0] == found[1][0] != []
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=0, equal_nan=True)


def test_requests_of_a_batch_do_not_see_each_other(saved):
    """A whole prompt, a chunk over a past and three decodes of several lengths in one step."""
    _, theirs, directory = saved
    _, runner = ours(directory)
    lengths = [33, 50, 1, 64, 22]
    prompts = [tokens(n, seed=n) for n in lengths]
    blocks = [list(range(10 * i, 10 * i + 5))[::-1] for i in range(5)]
    starts = [0, 13, 0, 63, 21]
    for i, start in enumerate(starts):
        if start:
            logits_of(runner, [Row(prompts[i][:start], 0, blocks[i])])
    rows = [Row(prompts[i][start:], start, blocks[i]) for i, start in enumerate(starts)]
    expected = torch.cat([their_logits(theirs, p)[start:] for p, start in zip(prompts, starts, strict=True)])
    torch.testing.assert_close(logits_of(runner, rows), expected, **TOLERANCE)


def test_bfloat16_is_as_close_to_float32_as_transformers(saved):
    _, theirs, directory = saved
    ids = tokens(LENGTH, seed=11)
    truth = their_logits(theirs, ids)
    source, runner = ours(directory, torch.bfloat16)
    # Of a token; outliers count in dense models only: a router's near tie may go the other way.
    error = (chunked(runner, ids, [50, 20]) - truth).abs()
    plain = (their_logits(deepcopy(theirs).to(torch.bfloat16), ids) - truth).abs()
    assert error.mean(-1).median() <= 1.25 * plain.mean(-1).median()
    assert source.config.num_experts or error.max() <= 2 * plain.max()
    assert plain.mean() < 0.2 * truth.abs().mean()  # or the two lines above would say nothing


def test_the_reference_backend_agrees(saved):
    _, theirs, directory = saved
    ids = tokens(LENGTH)
    logits = chunked(ours(directory, backend="reference")[1], ids, [40, 30])
    torch.testing.assert_close(logits, their_logits(theirs, ids), **TOLERANCE)


def test_each_family_is_what_its_case_says(saved):
    """The cases reach what they are named after: nothing above passes because a feature was off in both."""
    name, _, directory = saved
    config = ours(directory)[0].config
    latent = "deepseek" in name or "kimi" in name
    oss = name == "gpt-oss"
    assert (config.num_experts > 0) == ("mixtral" in name or "moe" in name or latent or oss)
    assert config.sinks == config.expert_biases == config.together == (config.activation == "clamped") == oss
    assert config.qk_norm == ("qwen3" in name or "gemma3" in name)
    assert config.qkv_bias == ("qwen2" in name or name in ("llama-bias", "qwen3-window", "gpt-oss", "glm4"))
    assert config.norm_plus_one == ("gemma" in name)
    assert config.post_norms == ("gemma" in name or "glm4" in name or "olmo2" in name)
    assert config.joint_qk_norm == config.no_input_norms == ("olmo2" in name)
    assert config.interleaved == (config.rotary_size > 0) == ("glm4" in name)
    assert config.fused == ("glm4" in name or "phi3" in name)
    windows = {
        "mistral": (20,) * 4,
        "qwen2-window-yarn": (0, 0, 20, 20),
        "qwen3-window": (0, 0, 20, 20),
        "mixtral-window": (20,) * 4,
        "phi3-window": (20,) * 4,
        "gpt-oss": (20, 0, 20, 0),
        "gemma2": (20, 0, 20, 0),
        "gemma2-caps": (20, 0, 20, 0),
        "gemma3": (20, 20, 20, 20, 20, 0, 20),
    }
    assert tuple(map(config.window, range(config.num_layers))) == windows.get(name, (0,) * config.num_layers)
    dense = {"qwen2moe": (1,), "qwen3moe-mixed": (0,), "kimi-k2": (0, 1)}
    assert config.dense_layers == dense.get(name, (0,) if latent else ())
    assert (config.latent is not None) == (config.routing is not None) == latent
    assert (config.shared_size > 0) == (latent or name == "qwen2moe")
    assert config.shared_gate == (name == "qwen2moe")
    scales = (config.score_scale, config.branch_scale, config.logit_divisor, config.embedding_scale - 1)
    assert all(scales) == (name == "granite") and any(scales[:3]) == (name == "granite")
    if config.latent is not None and config.routing is not None:
        assert (config.latent.query_rank > 0) == (name in ("deepseek2", "deepseek3"))
        assert config.latent.sharpness == pytest.approx(
            {"deepseek2": 1.2056, "deepseek3": 1.2965, "kimi-k2": 1.8133}.get(name, 1), abs=1e-4
        )
        assert config.latent.interleaved == (name != "kimi-k2")
        assert config.routing.groups == {"deepseek2": 3, "deepseek3": 4}.get(name, 1)
        assert config.routing.biased == ("3" in name or "kimi" in name)
    assert bool(config.local_rope_theta) == (name == "gemma3")


def test_a_table_of_parameters_counts_what_is_loaded(saved):
    _, theirs, directory = saved
    config: ModelConfig = ours(directory)[0].config
    matrices = [p.numel() for n, p in theirs.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    assert config.num_parameters == sum(matrices)
