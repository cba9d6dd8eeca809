"""Qwen3-Next and Kimi Linear against transformers: tiny random models, saved by it, with states in blocks of the pool.

float32: equal logits for whole prompts, chunks, decodes and batches, and equal greedy tokens. bfloat16: rounding
differs between implementations, its size must not.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.choice.choose import choose
from cache.block import PLANES
from cache.layer_groups import GONE, LayerGroups, layer_groups
from engine.checkpoint import weights
from engine.checkpoint.hf_config import from_hf
from engine.checkpoint.model_source import ModelSource, describe
from engine.checkpoint.named_weights import UnfitTensors, named
from engine.checkpoint.row_order import rotary_order
from engine.model.decoder import Model
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.model.ops.choice import choose_ops
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.step.runner import Row, Runner
from tests.engine.model.test_families import LENGTH, NEW, their_logits
from tests.engine.model.test_model import TOLERANCE, their_greedy, tokens
from tests.engine.tiny_families import save
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of

CASES = ("qwen3-next", "qwen3-next-dense", "kimi-linear")
NUM_BLOCKS = 400


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory) -> tuple[str, PreTrainedModel, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, save(request.param, directory, "60KB"), directory


def groups_of(config: ModelConfig, dtype: torch.dtype) -> LayerGroups:
    layer_bytes = PLANES[config.kv_kind] * config.num_kv_heads * BLOCK_SIZE * config.head_size * dtype.itemsize
    found = layer_groups(config.windows, config.states, config.state_bytes(dtype.itemsize), layer_bytes)
    assert found is not None
    return found


def ours(directory: Path, dtype: torch.dtype = torch.float32, backend: str = "torch") -> tuple[ModelSource, Runner]:
    """The saved model by our loader; its KV pool starts as NaN."""
    source = describe(str(directory))
    config, groups = source.config, groups_of(source.config, dtype)
    ops = choose_ops(backend, "cpu", dtype)
    model = Model(config, weights.load(source, dtype), choose(backend, "cpu"), ops=ops, groups=groups)
    return source, Runner(model, torch.full(shape_of(config, groups), torch.nan, dtype=dtype), BLOCK_SIZE)


def shape_of(config: ModelConfig, groups: LayerGroups) -> tuple[int, ...]:
    """Of the KV pool."""
    return NUM_BLOCKS, groups.layers, PLANES[config.kv_kind], config.num_kv_heads, BLOCK_SIZE, config.head_size


class Tables:
    """One request's blocks in all groups: a state at every `every`-th border, and where a step ends."""

    def __init__(self, runner: Runner, number: int = 0, every: int = 1) -> None:
        assert runner.model.groups is not None
        self.parts, self.every = runner.model.groups.num_states, every
        self.blocks = [(number + 5 * i) % 60 for i in range(12)]
        self.first = 60 + number * self.parts * 6

    def row(self, ids: list[int], start: int, sample: SamplingRow | None = None) -> Row:
        end = start + len(ids)
        ends = ((start - 1) // BLOCK_SIZE, (end - 1) // BLOCK_SIZE)
        places = range(-(-end // BLOCK_SIZE))
        kept = [place if place in ends or not (place + 1) % self.every else GONE for place in places]
        others = [
            [GONE if place == GONE else self.first + place * self.parts + part for place in kept]
            for part in range(self.parts)
        ]
        return Row(ids, start, self.blocks, sample, others=others)


def chunked(runner: Runner, ids: list[int], chunks: list[int], every: int = 1) -> Tensor:
    done, parts, tables = 0, [], Tables(runner, every=every)
    for size in chunks:
        parts.append(logits_of(runner, [tables.row(ids[done : done + size], done)]))
        done += size
    return torch.cat(parts)


def test_logits_and_tokens_equal_transformers(saved):
    _, theirs, directory = saved
    ids = tokens(LENGTH)
    truth = their_logits(theirs, ids)
    for chunks, every in (([LENGTH], 1), ([LENGTH], 100), ([16, 30, 1, 1, 22], 2)):
        torch.testing.assert_close(chunked(ours(directory)[1], ids, chunks, every), truth, **TOLERANCE)
    runner = ours(directory)[1]
    known, done, tables = list(ids), 0, Tables(runner)
    for size in (40, 30, *[1] * (NEW - 1)):
        sample = SamplingRow(SamplingParams(temperature=0), known, LENGTH) if done + size == len(known) else None
        (sampled,) = runner.step([tables.row(known[done : done + size], done, sample)])
        done, known = done + size, known + [one.token_id for one in sampled]
    assert known[LENGTH:] == their_greedy(theirs, ids, NEW)


def test_a_state_at_a_border_serves_another_request(saved):
    """Another text goes on behind 32 tokens of the first, from the state and the KV that this one has left."""
    _, theirs, directory = saved
    ids, runner = tokens(LENGTH), ours(directory)[1]
    tables = Tables(runner)
    logits_of(runner, [tables.row(ids, 0)])
    other = ids[:32] + tokens(20, seed=9)
    second = Tables(runner, number=3)
    second.blocks[:2] = tables.blocks[:2]
    row = second.row(other[32:], 32)
    for part, table in enumerate(row.others):
        table[1] = tables.first + 1 * tables.parts + part
    torch.testing.assert_close(logits_of(runner, [row]), their_logits(theirs, other)[32:], **TOLERANCE)


def test_requests_of_a_batch_do_not_see_each_other(saved):
    """A whole prompt, a chunk over a past and three decodes of several lengths in one step."""
    _, theirs, directory = saved
    _, runner = ours(directory)
    lengths, starts = [33, 50, 1, 64, 22], [0, 13, 0, 63, 21]
    prompts = [tokens(n, seed=n) for n in lengths]
    tables = [Tables(runner, number) for number in range(5)]
    for number, table in enumerate(tables):
        table.blocks = list(range(10 * number, 10 * number + 5))[::-1]
        if starts[number]:
            logits_of(runner, [table.row(prompts[number][: starts[number]], 0)])
    rows = [tables[i].row(prompts[i][start:], start) for i, start in enumerate(starts)]
    expected = torch.cat([their_logits(theirs, p)[start:] for p, start in zip(prompts, starts, strict=True)])
    torch.testing.assert_close(logits_of(runner, rows), expected, **TOLERANCE)


def test_bfloat16_is_as_close_to_float32_as_transformers(saved):
    _, theirs, directory = saved
    ids = tokens(LENGTH, seed=11)
    truth = their_logits(theirs, ids)
    plain = (their_logits(deepcopy(theirs).to(torch.bfloat16), ids) - truth).abs()
    error = (chunked(ours(directory, torch.bfloat16)[1], ids, [50, 20]) - truth).abs()
    assert error.mean(-1).median() <= 1.25 * plain.mean(-1).median()
    assert plain.mean() < 0.2 * truth.abs().mean()  # or the line above would say nothing


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_other_backends_agree(saved, backend):
    _, theirs, directory = saved
    ids = tokens(LENGTH)
    logits = chunked(ours(directory, backend=backend)[1], ids, [40, 29, 1])
    torch.testing.assert_close(logits, their_logits(theirs, ids), **TOLERANCE)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("known", "draft"), [(1, 5), (3, 1), (8, 20)])
def test_a_draft_leaves_no_state(saved, backend, known, draft):
    """Wrong drafts, also beyond a block border: their logits are those of their text, and the next step goes on behind
    the last known token as if they had not been."""
    _, theirs, directory = saved
    ids, wrong, start = tokens(LENGTH), tokens(draft, seed=5), 40
    runner, end = ours(directory, backend=backend)[1], 40 + known
    tables = Tables(runner, every=2)
    logits_of(runner, [tables.row(ids[:start], 0)])
    sample = SamplingRow(SamplingParams(temperature=0), ids[:end], end)
    row = replace(tables.row(ids[start:end] + wrong, start, sample), num_samples=1 + draft)
    kept = tables.row(ids[start:end], start).others
    row.others = [table + [GONE] * (len(other) - len(table)) for table, other in zip(kept, row.others, strict=True)]
    truth = their_logits(theirs, ids[:end] + wrong)[start:]
    torch.testing.assert_close(logits_of(runner, [row]), truth, **TOLERANCE)
    behind = logits_of(runner, [tables.row(ids[end:], end)])
    torch.testing.assert_close(behind, their_logits(theirs, ids)[end:], **TOLERANCE)


def test_rows_without_tables_measure_time(saved):
    """As calibration does: every request in blocks of its own, states included."""
    runner = ours(saved[2])[1]
    runner.step([Row([1] * 8, 40, list(range(4))), Row([1], 40, list(range(4, 8)))])


def test_each_case_is_what_its_name_says(saved):
    name, theirs, directory = saved
    config = ours(directory)[0].config
    layers = {"qwen3-next": (0, 1, 2), "qwen3-next-dense": (0, 2), "kimi-linear": (0, 1, 3)}
    assert config.delta is not None and config.delta.layers == layers[name]
    kimi = name == "kimi-linear"
    assert config.delta.by_channel == kimi == (config.latent is not None) == (config.routing is not None)
    assert config.gated == config.qk_norm == config.norm_plus_one == config.shared_gate == (not kimi)
    assert kimi or 0 < config.rotary_size == config.rope_size < config.head_size
    assert config.has_experts(0) == (name == "qwen3-next") and config.has_experts(3) and config.shared_size > 0
    assert kimi or config.delta.value_heads > config.delta.key_heads
    assert config.max_position_embeddings == 512
    groups = groups_of(config, torch.float32)
    assert groups.num_states > 1, "a state lies in several blocks"
    matrices = [p.numel() for n, p in theirs.named_parameters() if p.dim() > 1 and not n.endswith(("bias", "A_log"))]
    assert config.num_parameters == sum(matrices)


def test_rows_lie_as_the_rotation_wants_them():
    assert rotary_order(16, 8).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    assert rotary_order(16, 4).tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 2, 3, *range(10, 16)]
    assert rotary_order(8, 8).tolist() == list(range(8))


def test_a_model_needs_a_place_for_its_states(saved):
    source = describe(str(saved[2]))
    with pytest.raises(ValueError, match="needs groups for its states"):
        Model(source.config, weights.load(source, torch.float32), choose("torch", "cpu"))


def test_what_cannot_be_is_refused_by_name(saved):
    name, _, directory = saved
    if name == "kimi-linear":
        pytest.skip("the next test has its keys")
    config = json.loads((directory / "config.json").read_text())
    for key, value in (
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
        ("layer_types", ["linear_attention"] * 4),
        ("partial_rotary_factor", 0.3),
        ("linear_num_value_heads", 3),
        ("linear_conv_kernel_dim", 1),
    ):
        with pytest.raises(ModelError, match=key):
            from_hf(config | {"rope_parameters": {}, key: value})
    rope = config["rope_parameters"] | {"partial_rotary_factor": 0.3}
    with pytest.raises(ModelError, match=r"partial_rotary_factor 0\.3"):
        from_hf(config | {"rope_parameters": rope})
    ours_config = describe(str(directory)).config
    assert "one rank" in str(ours_config.indivisible(2)) and ours_config.indivisible(1) is None
    with pytest.raises(UnfitTensors, match="another order"):
        named(weights.shapes(ours_config), ours_config)


def test_what_kimi_linear_cannot_be(saved):
    name, _, directory = saved
    if name != "kimi-linear":
        pytest.skip("the test before has its keys")
    config = json.loads((directory / "config.json").read_text())
    for key, value in (
        ("attention_bias", True),
        ("mla_use_nope", False),
        ("moe_router_activation_func", "softmax"),
        ("moe_layer_freq", 2),
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
        ("layer_types", ["linear_attention"] * 3),
        ("mlp_layer_types", ["dense"] * 3 + ["moe"]),
        ("linear_attn_config", {"kda_layers": [1, 2], "full_attn_layers": [3]}),
        ("linear_conv_kernel_dim", 1),
    ):
        with pytest.raises(ModelError, match=key):
            from_hf(config | {key: value})
    published = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 3, "head_dim": 16}
    listed = {key: value for key, value in config.items() if key not in ("layer_types", "mlp_layer_types")}
    wanted, found = from_hf(config), from_hf(listed | {"linear_attn_config": published, "first_k_dense_replace": 1})
    assert found == wanted


def test_drafts_of_the_checkpoint_are_not_loaded(saved, tmp_path):
    from safetensors.torch import save_file

    if saved[0] == "kimi-linear":
        pytest.skip("num_nextn_predict_layers counts them, as for DeepSeek")
    source = describe(str(saved[2]))
    draft = tmp_path / "mtp.safetensors"
    save_file({"mtp.fc.weight": torch.zeros(2, 2)}, draft)
    more = replace(source, files=(*source.files, draft))
    assert weights.load(more, torch.float32).keys() == weights.load(source, torch.float32).keys()


def test_dummy_weights_make_finite_logits(saved):
    source = describe(str(saved[2]), load_format="dummy")
    config, groups = source.config, groups_of(source.config, torch.float32)
    model = Model(config, weights.load(source, torch.float32), choose("torch", "cpu"), groups=groups)
    runner = Runner(model, torch.zeros(shape_of(config, groups)), BLOCK_SIZE)
    logits = logits_of(runner, [Tables(runner).row(tokens(20), 0)])
    assert torch.isfinite(logits).all() and logits.std() > 0
