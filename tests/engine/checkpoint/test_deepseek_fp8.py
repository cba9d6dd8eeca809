"""DeepSeek's own form: fp8 in blocks of 128 x 128 with `weight_scale_inv`, the layers that predict further tokens, and
the bias of the router in float32. A tiny DeepSeek-V3 of transformers, rounded here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.choice.choose import choose
from attention.cpu.level import levels_here
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import load_quantized
from engine.model.decoder import Model
from engine.model.ops.cpu import CpuOps
from engine.model.ops.quantized import Scaled
from engine.step.runner import Row, Runner
from tests.engine.checkpoint.test_byte_weights import DEEPSEEK
from tests.engine.model.test_model import tokens
from tests.engine.tiny_families import empty_pool, save
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of

WIDE = ("embed_tokens", "lm_head", "mlp.gate.", "norm")


def rounded(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what they mean in float32: w = code * scale_inv of its 128 x 128 block."""
    outputs, inputs = values.shape
    scales = torch.empty(-(-outputs // 128), -(-inputs // 128))
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    meant = torch.empty_like(values)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = values[at].abs().max() / 448
            codes[at] = (values[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = codes[at].float() * scales[i, j]
    return codes, scales, meant


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    """A folder, and the values of its quantized matrices by their names."""
    folder: Path = tmp_path_factory.mktemp("deepseek")
    save("deepseek3", folder)
    tensors, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() < 2 or any(part in name for part in WIDE):
            tensors[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
        else:
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = rounded(tensor)
    extra = {"eh_proj.weight": torch.ones(96, 192), "self_attn.o_proj.weight": torch.ones(96, 96)}
    tensors |= {f"model.layers.4.{name}": tensor for name, tensor in extra.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": DEEPSEEK, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), meant


def test_values_are_those_of_the_blocks(checkpoint):
    folder, meant = checkpoint
    found = weights.load(describe(folder), torch.float32)
    for ours, theirs in {
        "layers.1.kv_a": "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "layers.1.kv_b": "model.layers.1.self_attn.kv_b_proj.weight",
        "layers.2.q_b": "model.layers.2.self_attn.q_b_proj.weight",
        "layers.1.shared.down": "model.layers.1.mlp.shared_experts.down_proj.weight",
        "layers.3.experts.5.up": "model.layers.3.mlp.experts.5.up_proj.weight",
    }.items():
        assert torch.equal(found[ours], meant[theirs]), ours


def test_the_bias_of_the_router_stays_exact(checkpoint):
    folder, _ = checkpoint
    exact = load_file(f"{folder}/model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    for found in (
        weights.load(describe(folder), torch.bfloat16),
        load_quantized(describe(folder), "stored", torch.bfloat16),
    ):
        assert found["layers.1.router_bias"].dtype == torch.float32
        assert torch.equal(found["layers.1.router_bias"], exact) and not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
def test_logits_are_those_of_the_widened_model(checkpoint):
    """As stored: all products but those into and out of the latent, which need kv_b in parts."""
    source = describe(checkpoint[0])
    stored = load_quantized(source, "stored", torch.float32)
    kinds = {name.rpartition(".")[2] for name, weight in stored.items() if isinstance(weight, Scaled)}
    assert kinds == {"q_a", "q_b", "kv_a", "o", "gate", "up", "down"}
    models = [
        Model(source.config, each, choose("torch", "cpu"), ops=CpuOps("auto", torch.float32, "bytes"))
        for each in (stored, weights.load(source, torch.float32))
    ]
    ids = tokens(50)
    ours, truth = (
        logits_of(Runner(model, empty_pool(source, torch.float32), BLOCK_SIZE), [Row(ids, 0, [5, 3, 9, 1])])
        for model in models
    )
    assert (ours - truth).norm() <= 1e-4 * truth.norm()
