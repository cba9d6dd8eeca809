"""Checkpoints in AWQ, GPTQ and compressed-tensors' pack-quantized, written here by encoders of these formats."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attention.choice.choose import choose
from attention.cpu.level import levels_here
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import load_quantized
from engine.loading.weight_type import weight_type
from engine.model.decoder import Model
from engine.model.model_error import ModelError
from engine.model.ops.cpu import CpuOps, CpuTail
from engine.model.ops.interface import TorchOps
from engine.model.ops.quantized import Quantized
from engine.step.runner import Row, Runner
from tests.engine.tiny_families import save
from tests.engine.tiny_llama import logits_of

torch.set_num_threads(1)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}
MATRICES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}


def together(nibbles: Tensor, bits=range(8)) -> Tensor:
    """[rows, 8 columns] of 0 .. 15 -> int32 [rows, columns]; column c of eight is in the bits from 4 bits[c] on."""
    eights = nibbles.long().view(len(nibbles), -1, 8)
    ints = sum(eights[..., column] << 4 * bit for column, bit in enumerate(bits))
    return torch.where(ints >= 1 << 31, ints - (1 << 32), ints).int()


def parts_of(
    quantization, shape, seed: int, symmetric: bool, act_order: int | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix [out, in] of random integers, and its values in float64."""
    (outputs, inputs), random = shape, torch.Generator().manual_seed(seed)
    method = quantization["quant_method"]
    stated = quantization.get("group_size") or quantization["config_groups"]["group_0"]["weights"].get("group_size", -1)
    group = inputs if stated == -1 else stated
    q = torch.randint(0, 16, shape, generator=random)
    z = torch.full((outputs, inputs // group), 8)
    if not symmetric:
        z = torch.randint(1, 16, z.shape, generator=random)
    s = (torch.rand(z.shape, generator=random) * 0.02 + 0.001).half()
    of = torch.arange(inputs) // group
    if act_order is not None:
        of = of[torch.randperm(inputs, generator=torch.Generator().manual_seed(act_order))]
    values = (q - z[:, of]).double() * s[:, of].double()
    if method == "compressed-tensors":
        tensors = {"weight_packed": together(q), "weight_scale": s, "weight_shape": torch.tensor(shape)}
    elif method == "awq":
        bits = (0, 4, 1, 5, 2, 6, 3, 7)
        tensors = {"qweight": together(q.T, bits), "qzeros": together(z.T, bits), "scales": s.T}
    else:
        one = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
        tensors = {
            "qweight": together(q).T,
            "qzeros": together(z.T - one),
            "scales": s.T,
            "g_idx": of.int(),
        }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, values


def write(folder, quantization, symmetric=True, act_order=False, changes=None) -> tuple[str, dict[str, Tensor]]:
    """A checkpoint, and the values of its quantized matrices by our names."""
    random = torch.Generator().manual_seed(1)
    tensors = {
        "model.embed_tokens.weight": torch.randn(50, 128, generator=random).half(),
        "lm_head.weight": torch.randn(50, 128, generator=random).half(),
        "model.norm.weight": torch.ones(128).half(),
    }
    values, short = {}, {"self_attn.": "", "mlp.": "", "_proj": ""}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = torch.ones(128).half()
        for seed, (name, shape) in enumerate(MATRICES.items()):
            # As a quantizer does it: matrices with the same input have one order.
            order = {"k": 1, "v": 1, "q": 1, "o": 2, "g": 3, "u": 3, "d": 4}[name.split(".")[1][0]]
            parts, exact = parts_of(quantization, shape, 10 * layer + seed, symmetric, order if act_order else None)
            tensors |= {f"{at}{name}.{part}": tensor for part, tensor in parts.items()}
            ours = name
            for long, brief in short.items():
                ours = ours.replace(long, brief)
            values[f"layers.{layer}.{ours}"] = exact
    save_file(tensors | (changes or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    return str(folder), values


CASES = [
    pytest.param(GPTQ, False, False, "q4_1", id="gptq"),
    pytest.param(GPTQ, True, True, "q4_0", id="gptq, symmetric, act-order"),
    pytest.param(GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}, False, False, "q4_1", id="gptq_v2"),
    pytest.param(AWQ, False, False, "q4_1", id="awq"),
    pytest.param(PACKED, True, False, "q4_0", id="pack-quantized"),
]
EVERY = pytest.mark.parametrize(("quantization", "symmetric", "act_order", "kind"), CASES)


@EVERY
def test_matrices_are_repacked_and_never_widened(tmp_path, quantization, symmetric, act_order, kind):
    folder, values = write(tmp_path, quantization, symmetric, act_order)
    source = describe(folder)
    stored, plain = load_quantized(source, "stored", torch.float32), weights.load(source, torch.float32)
    for name, exact in values.items():
        assert torch.equal(plain[name].double(), exact), name
        matrix = stored[name]
        assert isinstance(matrix, Quantized) and matrix.kind == kind and (matrix.order is not None) == act_order
        steps = 0 if symmetric else 0.022 / 128  # of the largest scale
        assert ((matrix.widened().double() - exact).abs() <= steps + 1e-7).all(), name
    assert not isinstance(stored["embed"], Quantized) and not isinstance(stored["lm_head"], Quantized)


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
@EVERY
def test_logits_are_those_of_the_widened_model(tmp_path, quantization, symmetric, act_order, kind):
    """But for rounded rows, about 1 % in each of the products. With act-order a layer is several calls."""
    source = describe(write(tmp_path, quantization, symmetric, act_order)[0])
    assert weight_type(source, "torch", torch.float32, "auto") == "wide"
    backend, config = choose("torch", "cpu"), source.config
    ops = CpuOps("auto", torch.float32, products="groups")
    stored = Model(config, load_quantized(source, "stored", torch.float32), backend, ops=ops)
    wide = Model(config, weights.load(source, torch.float32), backend, ops=TorchOps())
    assert all(isinstance(tail, CpuTail) != act_order for tail in stored.tails)
    rows = [Row(list(range(40)), 0, [0, 1, 2])]
    ours, truth = (logits_of(Runner(model, torch.zeros(3, 2, 2, 1, 16, 64), 16), rows) for model in (stored, wide))
    assert (ours - truth).norm() <= 0.05 * truth.norm()


def test_orders_that_differ_are_widened_and_named(tmp_path, caplog):
    """Products of q, k and v are one: their inputs must have one order."""
    other, _ = parts_of(GPTQ, (64, 128), 5, True, 77)
    changes = {f"model.layers.0.self_attn.k_proj.{part}": tensor for part, tensor in other.items()}
    source = describe(write(tmp_path, GPTQ, True, True, changes)[0])
    stored = load_quantized(source, "stored", torch.float32)
    wide = {name for name, weight in stored.items() if weight.dtype == torch.float32 and isinstance(weight, Tensor)}
    assert {name for name in wide if "norm" not in name} == {"embed", "lm_head", *(f"layers.0.{c}" for c in "qkv")}
    assert "3 matrices (act-order that differs) are widened to float32: layers.0." in caplog.text


def test_damaged_files_are_refused(tmp_path):
    folder, _ = write(tmp_path, GPTQ, changes={"model.layers.1.mlp.up_proj.g_idx": torch.zeros(128).int()})
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.g_idx does not give 64 inputs to every group"):
        load_quantized(describe(folder), "stored", torch.float32)
    scales = torch.ones(3, 256).half()
    folder, _ = write(tmp_path, GPTQ, changes={"model.layers.1.mlp.up_proj.scales": scales})
    with pytest.raises(ModelError, match=r"layers.1.up has scales \[256, 3\].*group_size"):
        weights.load(describe(folder), torch.float32)
    folder, _ = write(tmp_path, AWQ)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": PACKED}))
    with pytest.raises(ModelError, match="lacks"):
        weights.load(describe(folder), torch.float32)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ("int4", "quantization_config 'int4'"),
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method 'bitsandbytes'"),
        (GPTQ | {"bits": 8}, "quantization_config.bits 8"),
        (GPTQ | {"bits": True}, "quantization_config.bits True"),
        (GPTQ | {"group_size": 48}, "quantization_config.group_size 48"),
        (GPTQ | {"group_size": None}, "quantization_config.group_size None"),
        (GPTQ | {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format 'marlin'"),
        (AWQ | {"version": "gemv"}, "quantization_config.version 'gemv'"),
        (PACKED | {"format": "marlin-24"}, "quantization_config.format 'marlin-24'"),
        (PACKED | {"config_groups": {}}, "quantization_config.config_groups {}"),
        (
            PACKED | {"config_groups": {"a": {"targets": ["Linear"]}}},
            "quantization_config.config_groups.a.weights None",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(tmp_path, changed, key):
    folder, _ = write(tmp_path, GPTQ)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": changed}))
    with pytest.raises(ModelError) as caught:
        describe(folder)
    assert key in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["glm4", "phi3", "qwen3-next"])
def test_rows_in_another_order_are_refused_in_four_bits(tmp_path, name):
    """Their rows would be taken as they are, and the answers would be wrong."""
    save(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    describe(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ}))
    with pytest.raises(ModelError, match=r"quantization_config in config\.json is not supported"):
        describe(str(tmp_path))
