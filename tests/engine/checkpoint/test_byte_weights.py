"""Checkpoints in compressed-tensors' W8A8 and fp8 and in DeepSeek's fp8, written here by encoders of these formats."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attention.choice.choose import choose
from attention.cpu.level import levels_here
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import load_quantized
from engine.loading import weight_type as weight_type_module
from engine.loading.weight_type import weight_type
from engine.model.decoder import Model
from engine.model.model_error import ModelError
from engine.model.ops.cpu import CpuOps, CpuTail
from engine.model.ops.interface import TorchOps
from engine.model.ops.quantized import Scaled
from engine.model.parallel import Shard
from engine.step.runner import Row, Runner
from tests.engine.checkpoint import test_packed_weights as packed
from tests.engine.model.test_model import greedy
from tests.engine.tiny_llama import logits_of

torch.set_num_threads(1)
INNER = 320  # neither whole blocks of 128 outputs nor of 128 inputs
CONFIG = packed.CONFIG | {"intermediate_size": INNER}
MATRICES = packed.MATRICES | {
    "mlp.gate_proj": (INNER, 128),
    "mlp.up_proj": (INNER, 128),
    "mlp.down_proj": (128, INNER),
}


def compressed(kind: str, strategy: str, rows: dict | None, **weights_: object) -> dict:
    type_ = "int" if kind == "int" else "float"
    stated = {"num_bits": 8, "type": type_, "strategy": strategy, "symmetric": True, "dynamic": False, **weights_}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": stated, "input_activations": rows}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


INT_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
W8A8 = compressed("int", "channel", INT_ROWS)
STATIC = compressed("int", "tensor", INT_ROWS | {"strategy": "tensor", "dynamic": False})
FP8 = compressed("float", "channel", INT_ROWS | {"type": "float"})
FP8_BLOCKS = compressed("float", "block", None, block_structure=[128, 128])
DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


def parts_of(quantization: dict, shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix of random codes, and its values in float64."""
    random = torch.Generator().manual_seed(seed)
    deepseek = quantization["quant_method"] == "fp8"
    stated = {} if deepseek else quantization["config_groups"]["group_0"]["weights"]
    strategy = stated.get("strategy") or ("block" if "weight_block_size" in quantization else "tensor")
    values = torch.randn(shape, generator=random)
    blocks = -(-shape[0] // 128), -(-shape[1] // 128)
    scales = torch.rand({"tensor": (1,), "channel": (shape[0], 1), "block": blocks}[strategy], generator=random)
    if stated.get("type") == "int":
        codes, scales = (values * 40).round().clamp(-128, 127).to(torch.int8), (scales + 0.5) / 400
    else:
        codes, scales = (values * 60).clamp(-448, 448).to(torch.float8_e4m3fn), (scales + 0.5) / 600
    scales = scales.bfloat16() if strategy == "channel" else scales
    each = scales.double()
    if strategy == "block":
        each = each.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    named = "weight_scale_inv" if "weight_block_size" in quantization else "weight_scale"
    tensors = {"weight": codes, named: scales}
    if quantization in (STATIC, TENSOR):
        tensors["input_scale"] = torch.tensor([0.02])
    return tensors, codes.double() * each


def write(folder, quantization: dict, changes: dict | None = None, vocabulary: int = 50) -> tuple[str, dict]:
    """A checkpoint, and the values of its quantized matrices by our names."""
    random = torch.Generator().manual_seed(1)
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocabulary, 128, generator=random).half(),
        "lm_head.weight": torch.randn(vocabulary, 128, generator=random).half(),
        "model.norm.weight": torch.ones(128).half(),
    }
    values = {}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = torch.ones(128).half()
        for seed, (name, shape) in enumerate(MATRICES.items()):
            parts, exact = parts_of(quantization, shape, 10 * layer + seed)
            tensors |= {f"{at}{name}.{part}": tensor for part, tensor in parts.items()}
            values[f"layers.{layer}.{name.split('.')[1].removesuffix('_proj')}"] = exact
    tensors |= changes or {}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    config = CONFIG | {"vocab_size": vocabulary, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), values


EVERY = pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        pytest.param(W8A8, "int8", id="W8A8"),
        pytest.param(STATIC, "int8", id="W8A8, one scale, static rows"),
        pytest.param(FP8, "fp8", id="fp8"),
        pytest.param(FP8_BLOCKS, "fp8", id="fp8 blocks"),
        pytest.param(DEEPSEEK, "fp8", id="DeepSeek"),
        pytest.param(TENSOR, "fp8", id="fp8, one scale, static rows"),
    ],
)


@EVERY
def test_matrices_keep_their_codes(tmp_path, quantization, kind):
    folder, values = write(tmp_path, quantization)
    source = describe(folder)
    stored, plain = load_quantized(source, "stored", torch.float32), weights.load(source, torch.float32)
    for name, exact in values.items():
        matrix = stored[name]
        assert isinstance(matrix, Scaled) and matrix.kind == kind and matrix.shape == tuple(exact.shape)
        torch.testing.assert_close(plain[name].double(), exact, rtol=2**-23, atol=0)
        assert torch.equal(matrix.widened(), plain[name]), name
    assert {name for name, weight in stored.items() if isinstance(weight, Scaled)} == set(values)


def models(folder: str, dtype: torch.dtype = torch.float32) -> tuple[Model, Model]:
    """With its matrices as stored, and widened."""
    source = describe(folder)
    backend, ops = choose("torch", "cpu"), CpuOps("auto", dtype, "bytes")
    stored = Model(source.config, load_quantized(source, "stored", dtype), backend, ops=ops)
    return stored, Model(source.config, weights.load(source, dtype), backend, ops=TorchOps())


def runner_of(model: Model) -> Runner:
    return Runner(model, torch.zeros(6, 2, 2, 1, 16, 64), 16)


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
@EVERY
def test_logits_and_tokens_are_those_of_the_widened_model(tmp_path, quantization, kind):
    """In float32. fp8: as good as equal. int8: but for rounded rows, about 1 % in each of the products."""
    stored, wide = models(write(tmp_path, quantization)[0])
    assert all(isinstance(tail, CpuTail) for tail in stored.tails)
    for count in (1, 3, 40):
        rows = [Row(list(range(count)), 0, [0, 1, 2])]
        ours, truth = (logits_of(runner_of(model), rows) for model in (stored, wide))
        assert (ours - truth).norm() <= (0.05 if kind == "int8" else 1e-4) * truth.norm()
    if kind == "fp8":
        tokens = [greedy(runner_of(model), list(range(30)), 20, [17, 13], list(range(6))) for model in (stored, wide)]
        assert tokens[0] == tokens[1]


def test_auto_asks_for_the_kernels_of_bytes(tmp_path, monkeypatch, caplog):
    """And compiles no others. Next to bfloat16 fp8 is slower for some rows; next to float32 it is faster."""
    caplog.set_level("INFO")
    source = describe(write(tmp_path, W8A8)[0])
    asked = []

    class Kernels:
        level = "avx2"

        def __init__(self, *given: object) -> None:
            asked.append(given)

    monkeypatch.setattr(weight_type_module, "CpuOps", Kernels)
    assert weight_type(source, "cpu", torch.bfloat16, "auto") == "stored"
    assert asked == [("auto", torch.bfloat16, "bytes")] and "products are faster with int8" in caplog.text
    assert weight_type(source, "torch", torch.float32, "auto") == "wide"
    assert weight_type(describe(write(tmp_path, DEEPSEEK)[0]), "cpu", torch.bfloat16, "auto") == "wide"
    assert "wide, because products of fp8 are slower for 2 to 32 rows; stored needs less memory" in caplog.text
    assert weight_type(describe(tmp_path), "cpu", torch.float32, "auto") == "stored"
    assert "stored, because products are faster with fp8; wide gives torch.float32" in caplog.text


def test_a_layer_with_a_plain_matrix_is_widened_where_it_must_be(tmp_path, caplog):
    """q, k and v are one product."""
    at = "model.layers.0.self_attn.k_proj."
    plain = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)).half()
    source = describe(write(tmp_path, DEEPSEEK, {f"{at}weight": plain, f"{at}weight_scale_inv": None})[0])
    stored = load_quantized(source, "stored", torch.float32)
    wide = {name for name, weight in stored.items() if isinstance(weight, Tensor) and weight.ndim == 2}
    assert wide == {"embed", "lm_head", *(f"layers.0.{name}" for name in "qkv")}
    assert "2 matrices (fp8) are widened to float32: layers.0." in caplog.text


def test_inputs_that_are_no_whole_groups_are_widened(tmp_path, caplog):
    changes = {}
    for name, shape in {"gate": (328, 128), "up": (328, 128), "down": (128, 328)}.items():
        for layer in range(2):
            parts, _ = parts_of(DEEPSEEK, shape, layer)
            changes |= {f"model.layers.{layer}.mlp.{name}_proj.{part}": tensor for part, tensor in parts.items()}
    folder, _ = write(tmp_path, DEEPSEEK, changes)
    config = CONFIG | {"intermediate_size": 328, "quantization_config": DEEPSEEK}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = load_quantized(describe(folder), "stored", torch.float32)
    assert isinstance(stored["layers.0.gate"], Scaled) and isinstance(stored["layers.0.down"], Tensor)
    assert "2 matrices (328 inputs) are widened to float32: layers.0.down, layers.1.down" in caplog.text


def test_any_checkpoint_becomes_fp8_while_loading(tiny_gguf):
    source = describe(str(tiny_gguf()))
    loaded, plain = load_quantized(source, "fp8", torch.float32), weights.load(source, torch.float32)
    for name, weight in plain.items():
        if weight.ndim == 2 and name not in ("embed", "lm_head"):
            assert torch.equal(loaded[name].widened(), Scaled.fp8(weight, torch.float32).widened())
        else:
            assert torch.equal(loaded[name], weight)


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
def test_experts_keep_their_codes(tmp_path):
    """A Qwen3-MoE: two experts of 64, whose names have no place in a dense model. fp8: as good as equal."""
    expert = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    changes: dict[str, Tensor | None] = {}
    values = {}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name in expert:
            changes |= dict.fromkeys((f"{at}mlp.{name}.weight", f"{at}mlp.{name}.weight_scale_inv"))
        changes |= {f"{at}self_attn.{norm}_norm.weight": torch.ones(64).half() for norm in "qk"}
        router = torch.randn(2, 128, generator=torch.Generator().manual_seed(layer))
        changes[f"{at}mlp.gate.weight"] = router.half()
        for number in range(2):
            for seed, (name, shape) in enumerate(expert.items()):
                parts, exact = parts_of(DEEPSEEK, shape, 10 * number + seed)
                changes |= {f"{at}mlp.experts.{number}.{name}.{part}": each for part, each in parts.items()}
                values[f"layers.{layer}.experts.{number}.{name.removesuffix('_proj')}"] = exact
    folder, _ = write(tmp_path, DEEPSEEK, changes)
    sparse = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "head_dim": 64}
    config = CONFIG | sparse | {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": DEEPSEEK}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = describe(str(tmp_path))
    plain, kept = weights.load(source, torch.float32), load_quantized(source, "stored", torch.float32)
    for name, exact in values.items():
        torch.testing.assert_close(plain[name].double(), exact, rtol=2**-23, atol=0)
        assert isinstance(kept[name], Scaled) and torch.equal(kept[name].widened(), plain[name])
    stored, wide = models(folder)
    for count in (1, 3, 40):
        rows = [Row(list(range(count)), 0, [0, 1, 2])]
        ours, truth = (logits_of(runner_of(model), rows) for model in (stored, wide))
        assert (ours - truth).norm() <= 1e-4 * truth.norm()


def test_ranks_get_their_parts_of_the_widened_weights(tmp_path):
    folder, values = write(tmp_path, FP8_BLOCKS)
    source = describe(folder)
    shards = [Shard(source.config, rank, 2) for rank in range(2)]
    loaded = [weights.load(source, torch.float32, shard=shard) for shard in shards]
    whole = torch.cat([each["layers.1.gate"] for each in loaded])
    torch.testing.assert_close(whole.double(), values["layers.1.gate"], rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    ("quantization", "part", "tensor", "message"),
    [
        (DEEPSEEK, "weight", torch.full((INNER, 128), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), "not finite"),
        (
            DEEPSEEK,
            "weight_scale_inv",
            torch.full((3, 1), torch.inf),
            "weight_scale_inv has numbers that are not finite",
        ),
        (
            DEEPSEEK,
            "weight_scale_inv",
            torch.ones(2, 1),
            r"\[2, 1\], which is not one scale for each block of \[320, 128",
        ),
        (DEEPSEEK, "weight_scale_inv", None, "of type F8_E4M3 has no weight_scale"),
        (DEEPSEEK, "weight", torch.ones(INNER, 128).half(), "of type F16 has a weight_scale"),
        (DEEPSEEK, "weight", torch.ones(INNER, 128).to(torch.int8), "is of type I8, not fp8"),
        (DEEPSEEK, "weight", None, "has no weight: fetch"),
        (W8A8, "weight_scale", torch.ones(3, 1), r"is not one scale for each channel of \[320, 128"),
        (W8A8, "weight_scale", torch.full((INNER, 1), torch.nan), "not finite"),
        (STATIC, "weight_scale", torch.ones(INNER, 1), "is not one scale for each tensor"),
    ],
)
def test_damaged_files_are_refused(tmp_path, quantization, part, tensor, message):
    folder, _ = write(tmp_path, quantization, {f"model.layers.1.mlp.up_proj.{part}": tensor})
    source = describe(folder)
    for load in (weights.load, lambda source, dtype: load_quantized(source, "stored", dtype)):
        with pytest.raises(ModelError, match=message) as caught:
            load(source, torch.float32)
        assert "model.layers.1.mlp.up_proj" in str(caught.value)


def changed(quantization: dict, path: str, value: object) -> dict:
    """A copy with another value of weights.X, input_activations.X or X."""
    copy = deepcopy(quantization)
    *folders, key = path.split(".")
    at = copy["config_groups"]["group_0"] if folders or key == "input_activations" else copy
    for folder in folders:
        at = at[folder]
    at[key] = value
    return copy


@pytest.mark.parametrize(
    ("quantization", "path", "value"),
    [
        (W8A8, "format", "naive-quantized"),
        (W8A8, "kv_cache_scheme", {"num_bits": 8}),
        (W8A8, "transform_config", {"config_groups": {"u": {}}}),
        (W8A8, "weights.num_bits", 4),
        (W8A8, "weights.type", "float"),
        (W8A8, "weights.strategy", "group"),
        (W8A8, "weights.symmetric", False),
        (W8A8, "input_activations", None),
        (W8A8, "input_activations.num_bits", 16),
        (W8A8, "input_activations.type", "float"),
        (FP8, "weights.strategy", "group"),
        (FP8, "input_activations.num_bits", 4),
        (FP8_BLOCKS, "weights.block_structure", [64, 64]),
        (DEEPSEEK, "fmt", "e5m2"),
        (DEEPSEEK, "weight_block_size", [64, 128]),
        (DEEPSEEK, "activation_scheme", "none"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(tmp_path, quantization, path, value):
    folder, _ = write(tmp_path, quantization)
    config = CONFIG | {"quantization_config": changed(quantization, path, value)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        describe(folder)
    inside = path.split(".")[0] in ("weights", "input_activations")
    key = f"config_groups.group_0.{path}" if inside else path
    assert f"quantization_config.{key} " in str(caught.value) and "\n" not in str(caught.value)
