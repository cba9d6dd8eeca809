"""Checkpoints in gpt-oss' MXFP4 and compressed-tensors' mxfp4-pack-quantized, written here by encoders of these
formats: dense models, and experts, together in one tensor (Qwen3-MoE) and one by one (Mixtral)."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.choice.choose import choose
from attention.cpu.level import levels_here
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import load_quantized
from engine.loading.weight_type import FASTER, weight_type
from engine.model.decoder import Model
from engine.model.model_error import ModelError
from engine.model.ops.cpu import CpuOps
from engine.model.ops.interface import TorchOps
from engine.model.ops.quantized import Quantized
from engine.step.runner import Row, Runner
from tests.engine.checkpoint.test_packed_weights import CONFIG, MATRICES
from tests.engine.tiny_families import ours, save
from tests.engine.tiny_llama import logits_of

torch.set_num_threads(1)
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
            "input_activations": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head"],
}
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
EXPERTS, INNER = 3, 96


def parts_of(quantization: dict, shape: tuple[int, ...], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Ends of names -> the tensors of random codes, and their values in float64."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=random, dtype=torch.uint8)
    scales = torch.randint(120, 125, (*shape[:-1], shape[-1] // 32), generator=random, dtype=torch.uint8)
    values = VALUES[codes.long()] * 2.0 ** (scales.double() - 127).repeat_interleave(32, -1)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    if quantization["quant_method"] == "mxfp4":
        return {"_blocks": pairs.view(*scales.shape, 16), "_scales": scales}, values
    return {"_packed": pairs, "_scale": scales}, values


def write(folder, quantization: dict, family: str = "Llama", changes: dict | None = None) -> tuple[str, dict]:
    """A checkpoint, and the values of its quantized matrices by our names. Of a family with experts only these are
    quantized."""
    random = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(50, 128, generator=random).half() for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors["model.norm.weight"] = torch.ones(128).half()
    values: dict[str, Tensor] = {}
    config = dict(CONFIG)

    def add(parameter: str, shape: tuple[int, ...]) -> Tensor:
        parts, exact = parts_of(quantization, shape, len(tensors))
        tensors.update({parameter + end: tensor for end, tensor in parts.items()})
        return exact

    for layer in range(2):
        at, ours = f"model.layers.{layer}.", f"layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = torch.ones(128).half()
        for name, shape in MATRICES.items():
            if family == "Llama":
                values[ours + name.split(".")[1].removesuffix("_proj")] = add(f"{at}{name}.weight", shape)
            elif name.startswith("self_attn"):
                tensors[f"{at}{name}.weight"] = (torch.randn(shape, generator=random) * 0.1).half()
        if family == "Qwen3Moe":
            config |= {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "num_experts_per_tok": 2, "head_dim": 64}
            tensors |= {f"{at}self_attn.{norm}_norm.weight": torch.ones(64).half() for norm in "qk"}
            tensors[f"{at}mlp.gate.weight"] = (torch.randn(EXPERTS, 128, generator=random) * 0.1).half()
            gate_up = add(f"{at}mlp.experts.gate_up_proj", (EXPERTS, 2 * INNER, 128))
            down = add(f"{at}mlp.experts.down_proj", (EXPERTS, 128, INNER))
            for expert in range(EXPERTS):
                gate, up = gate_up[expert].chunk(2)
                values |= {f"{ours}experts.{expert}.{name}": each for name, each in (("gate", gate), ("up", up))}
                values[f"{ours}experts.{expert}.down"] = down[expert]
        if family == "Mixtral":
            config |= {"num_local_experts": EXPERTS, "intermediate_size": INNER, "num_experts_per_tok": 2}
            tensors[f"{at}block_sparse_moe.gate.weight"] = (torch.randn(EXPERTS, 128, generator=random) * 0.1).half()
            for expert in range(EXPERTS):
                for theirs, name, shape in (
                    ("w1", "gate", (INNER, 128)),
                    ("w3", "up", (INNER, 128)),
                    ("w2", "down", (128, INNER)),
                ):
                    exact = add(f"{at}block_sparse_moe.experts.{expert}.{theirs}.weight", shape)
                    values[f"{ours}experts.{expert}.{name}"] = exact
    tensors |= changes or {}
    save_file(
        {name: each.contiguous() for name, each in tensors.items() if each is not None}, folder / "model.safetensors"
    )
    config |= {"architectures": [f"{family}ForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), values


EVERY = pytest.mark.parametrize(
    ("quantization", "family"),
    [
        pytest.param(GPT_OSS, "Llama", id="mxfp4"),
        pytest.param(PACKED, "Llama", id="mxfp4-pack-quantized"),
        pytest.param(GPT_OSS, "Qwen3Moe", id="mxfp4, experts in one tensor"),
        pytest.param(GPT_OSS, "Mixtral", id="mxfp4, experts one by one"),
        pytest.param(PACKED, "Mixtral", id="mxfp4-pack-quantized, experts"),
    ],
)


@EVERY
def test_matrices_keep_their_bits(tmp_path, quantization, family):
    """4.25 bits for each element, and exactly the values of the file."""
    folder, values = write(tmp_path, quantization, family)
    source = describe(folder)
    stored, plain = load_quantized(source, "stored", torch.float32), weights.load(source, torch.float32)
    for name, exact in values.items():
        matrix = stored[name]
        assert isinstance(matrix, Quantized) and matrix.kind == "mxfp4" and matrix.shape == tuple(exact.shape)
        assert 8 * matrix.nbytes == 4.25 * exact.numel()
        assert torch.equal(matrix.widened().double(), exact) and torch.equal(plain[name].double(), exact), name
    assert {name for name, weight in stored.items() if isinstance(weight, Quantized)} == set(values)


@pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")
@EVERY
def test_logits_are_those_of_the_widened_model(tmp_path, quantization, family):
    """But for rounded rows, about 1 % in each of the products."""
    source = describe(write(tmp_path, quantization, family)[0])
    assert weight_type(source, "torch", torch.float32, "auto") == "wide"
    if levels_here()[0] in FASTER:
        assert weight_type(source, "cpu", torch.float32, "auto") == "stored"
    backend, ops = choose("torch", "cpu"), CpuOps("auto", torch.float32, products="groups")
    stored = Model(source.config, load_quantized(source, "stored", torch.float32), backend, ops=ops)
    wide = Model(source.config, weights.load(source, torch.float32), backend, ops=TorchOps())
    for count in (1, 3, 40):
        rows = [Row(list(range(count)), 0, [0, 1, 2])]
        ours, truth = (logits_of(Runner(model, torch.zeros(3, 2, 2, 1, 16, 64), 16), rows) for model in (stored, wide))
        assert (ours - truth).norm() <= 0.05 * truth.norm(), count


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("quantization", "end", "tensor", "message"),
    [
        (GPT_OSS, "_scales", torch.full((256, 4), 255, dtype=torch.uint8), f"{UP}_scales has numbers .* not finite"),
        (GPT_OSS, "_scales", None, f"{UP} lacks its {UP}_scales"),
        (GPT_OSS, "_blocks", None, f"{UP} lacks its {UP}_blocks"),
        (GPT_OSS, "_scales", torch.ones(256, 4), f"{UP}_scales is of type F32, not U8"),
        (GPT_OSS, "_blocks", torch.ones(256, 4, 8, dtype=torch.uint8), r"codes \[256, 4, 8\] and scales \[256, 4\]"),
        (GPT_OSS, "_scales", torch.ones(256, dtype=torch.uint8), r"and scales \[256\]"),
        (PACKED, "_scale", torch.ones(256, 8, dtype=torch.uint8), r"codes \[256, 64\] and scales \[256, 8\]"),
        (PACKED, "_packed", None, "mlp.up_proj lacks its model.layers.1.mlp.up_proj.weight_packed"),
    ],
)
def test_damaged_files_are_refused(tmp_path, quantization, end, tensor, message):
    source = describe(write(tmp_path, quantization, changes={UP + end: tensor})[0])
    for load in (weights.load, lambda source, dtype: load_quantized(source, "stored", dtype)):
        with pytest.raises(ModelError, match=message):
            load(source, torch.float32)


def test_experts_that_do_not_fit_the_model_are_refused(tmp_path):
    """One expert more, and gates without as many rows of up."""
    down = "model.layers.0.mlp.experts.down_proj"
    more = {down + end: part for end, part in parts_of(GPT_OSS, (EXPERTS + 1, 128, INNER), 5)[0].items()}
    with pytest.raises(ModelError, match=r"weights of another architecture: layers.0.experts.3.down"):
        weights.load(describe(write(tmp_path, GPT_OSS, "Qwen3Moe", more)[0]), torch.float32)
    both = "model.layers.0.mlp.experts.gate_up_proj"
    odd = {both + end: part for end, part in parts_of(GPT_OSS, (EXPERTS, 2 * INNER + 1, 128), 5)[0].items()}
    with pytest.raises(ModelError, match=r"gate_up_proj has codes \[3, 193, 4, 16\]"):
        weights.load(describe(write(tmp_path, GPT_OSS, "Qwen3Moe", odd)[0]), torch.float32)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("weights.num_bits", 8),
        ("weights.type", "int"),
        ("weights.group_size", 16),
        ("weights.strategy", "tensor_group"),
        ("weights.symmetric", False),
        ("input_activations", 4),
        ("input_activations.num_bits", 16),
        ("input_activations.type", "int"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(tmp_path, path, value):
    quantization = deepcopy(PACKED)
    at = quantization["config_groups"]["group_0"]
    *folders, key = path.split(".")
    for folder in folders:
        at = at[folder]
    at[key] = value
    with pytest.raises(ModelError) as caught:
        describe(write(tmp_path, quantization)[0])
    assert f"quantization_config.config_groups.group_0.{path} " in str(caught.value)


def test_gpt_oss_itself(tmp_path):
    """Rows of gate and up in turns, biases and sinks in floats: the logits of a file with the same values in floats,
    which transformers wrote (test_families.py compares these), and stored matrices keep their bits."""
    floats, fours = tmp_path / "floats", tmp_path / "fours"
    save("gpt-oss", floats)
    tensors = load_file(floats / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors[name].shape
        parts, exact = parts_of(GPT_OSS, (experts, outputs, inputs), len(name))
        tensors[name] = exact.float().mT.contiguous()
        tensors.update({f"4 {name}{end}": part for end, part in parts.items()})
    fours.mkdir()
    packed = {name[2:]: each for name, each in tensors.items() if name.startswith("4 ")}
    plain = {name: each for name, each in tensors.items() if not name.startswith("4 ")}
    save_file(plain, floats / "model.safetensors")
    kept = {name: each for name, each in plain.items() if f"{name}_blocks" not in packed}
    save_file(kept | packed, fours / "model.safetensors")
    config = json.loads((floats / "config.json").read_text())
    (fours / "config.json").write_text(json.dumps(config | {"quantization_config": GPT_OSS}))

    rows = [Row(list(range(40)), 0, [0, 1, 2])]
    truth, widened = (logits_of(ours(folder)[1], rows) for folder in (floats, fours))
    assert truth.isfinite().all() and torch.equal(widened, truth)
    source = describe(str(fours))
    stored, wide = load_quantized(source, "stored", torch.float32), weights.load(source, torch.float32)
    fits = [name for name, weight in stored.items() if isinstance(weight, Quantized)]
    assert len(fits) == config["num_hidden_layers"] * config["num_local_experts"] * 3
    assert all(torch.equal(stored[name].widened(), wide[name]) for name in fits)
