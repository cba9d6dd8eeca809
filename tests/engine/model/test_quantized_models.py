"""The embedded model with its matrices as the GGUF file stores them, never widened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attention.choice.choose import choose
from attention.cpu.level import levels_here
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import load_quantized
from engine.config.config import Config
from engine.config.flags import UsageError
from engine.loading import load_model as loading
from engine.model.decoder import Model
from engine.model.ops.choice import choose_ops
from engine.model.ops.cpu import CpuOps, Packed
from engine.model.ops.interface import TorchOps
from engine.step.runner import Row, Runner
from lab.bench.quantization.command import text_tokens
from tests.engine.tiny_llama import logits_of

pytestmark = pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
WINDOW = 256


def runner_of(model: Model, blocks: int) -> Runner:
    config = model.config
    shape = (blocks, config.num_layers, 2, config.num_kv_heads, 16, config.head_size)
    return Runner(model, torch.zeros(shape, dtype=model.dtype), 16)


def stored_model(embedded, dtype: torch.dtype = torch.bfloat16, backend: str = "cpu") -> Model:
    torch.set_num_threads(1)
    ops = choose_ops("cpu", "cpu", dtype, products="groups")
    return Model(embedded.config, load_quantized(embedded, "stored", dtype), choose(backend, "cpu"), ops=ops)


def test_its_logits_beside_those_of_widened_weights(embedded, embedded_weights, embedded_tokenizer):
    """The weights are the same, so what differs from float32 is the rounding of rows: to 8 bits in groups of 32, and to
    bfloat16, which alone has an error too. On English text the first choice is that of float32 at as good as all
    positions."""
    ids = text_tokens(embedded_tokenizer, WINDOW)
    row = Row(ids, 0, list(range(WINDOW // 16)))

    def logits(dtype: torch.dtype) -> Tensor:
        of = {name: weight.to(dtype) for name, weight in embedded_weights.items()}
        return logits_of(runner_of(Model(embedded.config, of, choose("torch", "cpu"), ops=TorchOps()), 16), [row])

    truth, plain = logits(torch.float32), logits(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        ours = logits_of(runner_of(stored_model(embedded, dtype, "torch"), 16), [row])
        error, base = ((each - truth).abs().mean().item() for each in (ours, plain))
        agreed = (ours.argmax(-1) == truth.argmax(-1)).float().mean().item()
        print(dtype, error, base, agreed, (plain.argmax(-1) == truth.argmax(-1)).float().mean().item())
        assert 0 < error <= 3 * base
        assert agreed >= 0.93


def test_all_layers_in_one_call_are_what_they_are_one_by_one(embedded, embedded_tokenizer):
    model, ids = stored_model(embedded), text_tokens(embedded_tokenizer, 60)
    assert model.layers_at_once is not None
    found = []
    for one_by_one in (False, True):
        runner, layers = runner_of(model, 4), []
        on_layer = layers.append if one_by_one else None
        for rows in ([Row(ids[:40], 0, [0, 1, 2, 3])], [Row(ids[40:41], 40, [0, 1, 2, 3])]):
            inputs = runner._inputs.build(rows)
            every = torch.arange(len(inputs.token_ids))
            found.append(model.forward(inputs.token_ids, inputs.batch, runner.kv_pool, every, on_layer))
        assert len(layers) == 2 * embedded.config.num_layers * one_by_one
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_a_file_in_types_of_256_inputs(tiny_gguf):
    """With q, k and v of two types in one layer. Random weights amplify what rounding rows changes, to 12 % here; a
    number in a wrong place changes everything."""
    torch.set_num_threads(1)
    source = describe(str(tiny_gguf(tiny_gguf.in_blocks("Q4_K", {"blk.1.attn_v.weight": "Q6_K"}))))
    backend, row = choose("torch", "cpu"), Row(list(range(40)), 0, [0, 1, 2])
    ops = choose_ops("cpu", "cpu", torch.float32, products="groups")
    stored = Model(source.config, load_quantized(source, "stored", torch.float32), backend, ops=ops)
    wide = Model(source.config, weights.load(source, torch.float32), backend, ops=TorchOps())
    assert all(isinstance(layer.qkv, Packed) for layer in stored.layers)
    ours, truth = (logits_of(runner_of(model, 3), [row]) for model in (stored, wide))
    assert (ours - truth).norm() <= 0.2 * truth.norm()


def test_no_matrix_is_widened_in_memory(embedded):
    """As many bytes as in the file."""
    model = stored_model(embedded)
    matrices = [model.embedding]
    for layer in model.layers:
        matrices += [layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down]
    assert all(isinstance(each, Packed) and each.memory.dtype == torch.uint8 for each in matrices)
    config = embedded.config
    vocabulary = config.vocab_size * config.hidden_size
    stored = vocabulary // 32 * 34 + (config.num_parameters - vocabulary) // 32 * 20
    assert sum(each.memory.nbytes for each in matrices) == stored


def test_a_cpu_without_kernels_is_refused_by_the_flag(monkeypatch):
    """Torch computes plain weights there; these would have to be widened."""
    for module in ("level", "build"):
        monkeypatch.setattr(f"attention.cpu.{module}.cpu_features", lambda: frozenset({"sse2"}))
    config, backend = Config(weight_dtype="stored", device="cpu"), SimpleNamespace(name="torch")
    with pytest.raises(UsageError, match=r"--weight-dtype stored: this CPU .* lacks AVX2"):
        loading._ops(config, backend, torch.bfloat16, products="groups")
    assert type(loading._ops(config, backend, torch.bfloat16)) is TorchOps


def test_any_attention_backend_goes_with_quantized_weights():
    for backend in ("torch", "reference", "cpu"):
        ops = choose_ops(backend, "cpu", torch.float32, products="groups")
        assert isinstance(ops, CpuOps) and ops.dtype == torch.float32
