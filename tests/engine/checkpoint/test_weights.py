"""Weights from every source come back as the numbers that were written, under our names, rows in our order."""

from __future__ import annotations

import json
import struct
from itertools import accumulate

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.checkpoint import weights
from engine.checkpoint.gguf.weights import half_split
from engine.checkpoint.model_source import describe
from engine.checkpoint.weights import shapes
from engine.model.model_error import ModelError

torch.set_num_threads(1)


def half_split_rows(rows: np.ndarray, head_size: int) -> np.ndarray:
    """What `half_split` must do, row by row."""
    out = np.empty_like(rows)
    for row in range(len(rows)):
        head, i = divmod(row, head_size)
        out[row] = rows[head * head_size + (2 * i if i < head_size // 2 else 2 * (i - head_size // 2) + 1)]
    return out


def interleave_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """The permutation that converters to GGUF apply to q and k."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


# --- GGUF types


def decode_q4_k(block: bytes) -> list[float]:
    """256 values from 144 bytes, as the format's C structure is documented: 8 groups of 32, 6-bit scale and minimum."""
    d, dmin = struct.unpack("<2e", block[:4])
    q, nibbles = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = q[group] & 63, q[group + 4] & 63
        else:
            scale = (q[group + 4] & 15) | (q[group - 4] >> 6 << 4)
            minimum = (q[group + 4] >> 4) | (q[group] >> 6 << 4)
        shift = 4 * (group % 2)
        values += [d * scale * (byte >> shift & 15) - dmin * minimum for byte in nibbles[group // 2 * 32 :][:32]]
    return values


def decode_q6_k(block: bytes) -> list[float]:
    """256 values from 210 bytes: low 4 bits, high 2 bits, 16 signed scales, one float16."""
    low, high = block[:128], block[128:192]
    scales, (d,) = struct.unpack("<16b", block[192:208]), struct.unpack("<e", block[208:])
    values = []
    for i in range(256):
        half, quarter, lane = i // 128, i % 128 // 32, i % 32
        nibble = low[half * 64 + quarter % 2 * 32 + lane] >> (4 * (quarter // 2)) & 15
        bits = high[half * 32 + lane] >> (2 * quarter) & 3
        values.append(d * scales[i // 16] * ((nibble | bits << 4) - 32))
    return values


def random_blocks(kind: Type, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Raw rows of a type that the gguf package cannot write: random bits, small float16 scales."""
    random = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // elements, size), dtype=np.uint8)
    scales = random.uniform(0.001, 0.01, (len(blocks), 2)).astype("<f2").view(np.uint8)
    if kind is Type.Q4_K:
        blocks[:, :4] = scales
    else:
        blocks[:, -2:] = scales[:, :2]
    return blocks.reshape(shape[0], -1)


def stored(kind: Type, values: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(what the file holds, the float32 numbers it means) for a matrix of this type."""
    if kind is Type.F32:
        return values, values
    if kind is Type.F16:
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    if kind in (Type.Q4_K, Type.Q6_K):
        rows = random_blocks(kind, values.shape, seed)
        decode, size = (decode_q4_k, 144) if kind is Type.Q4_K else (decode_q6_k, 210)
        data = rows.tobytes()
        meant = [decode(data[at : at + size]) for at in range(0, len(data), size)]
        return rows, np.array(meant, dtype=np.float32).reshape(values.shape)
    rows = gguf.quants.quantize(values, kind)
    return rows, gguf.dequantize(rows, kind)


KINDS = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q6_K]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gguf_type(tiny_gguf, kind):
    tensors, meant = tiny_gguf.tensors(), {}
    for seed, (name, values) in enumerate(tensors.items()):
        meant[name] = values
        if values.ndim == 2:
            rows, meant[name] = stored(kind, values, seed)
            tensors[name] = (rows, kind)
    source = describe(str(tiny_gguf(tensors)))
    loaded = weights.load(source, torch.float32)
    assert list(loaded) == list(shapes(source.config)) and "lm_head" not in loaded
    assert source.config.dtype == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(
        kind.name, kind.name.lower()
    )
    for ours, theirs in {
        "embed": "token_embd.weight",
        "norm": "output_norm.weight",
        "layers.0.attn_norm": "blk.0.attn_norm.weight",
        "layers.1.mlp_norm": "blk.1.ffn_norm.weight",
        "layers.0.v": "blk.0.attn_v.weight",
        "layers.1.o": "blk.1.attn_output.weight",
        "layers.0.gate": "blk.0.ffn_gate.weight",
        "layers.1.up": "blk.1.ffn_up.weight",
        "layers.0.down": "blk.0.ffn_down.weight",
    }.items():
        torch.testing.assert_close(loaded[ours], torch.from_numpy(meant[theirs]), rtol=1e-6, atol=1e-7, msg=ours)
    for ours, theirs in {"layers.0.q": "blk.0.attn_q.weight", "layers.1.k": "blk.1.attn_k.weight"}.items():
        expected = torch.from_numpy(half_split_rows(meant[theirs], 64))
        torch.testing.assert_close(loaded[ours], expected, rtol=1e-6, atol=1e-7, msg=ours)


@pytest.mark.parametrize("heads", [1, 3, 9])
@pytest.mark.parametrize("head_size", [2, 64, 80])
def test_q_and_k_rows_come_back_from_the_converters_order(heads, head_size):
    rows = np.random.default_rng(0).standard_normal((heads * head_size, 5), dtype=np.float32)
    permuted = torch.from_numpy(interleave_rows(rows, heads).copy())
    assert torch.equal(half_split(permuted, heads), torch.from_numpy(rows))


def test_gguf_with_its_own_head(tiny_gguf):
    tensors = tiny_gguf.tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    source = describe(str(tiny_gguf(tensors)))
    loaded = weights.load(source, torch.float32)
    assert not source.config.tie_word_embeddings
    assert torch.equal(loaded["lm_head"], torch.from_numpy(tensors["output.weight"]))


def test_gguf_type_that_cannot_be_dequantised(tiny_gguf):
    tensors = tiny_gguf.tensors()
    shape = tensors["blk.0.attn_v.weight"].shape
    tensors["blk.0.attn_v.weight"] = (np.zeros((shape[0], shape[1] // 256 * 292), np.uint8), Type.Q8_K)
    source = describe(str(tiny_gguf(tensors)))
    with pytest.raises(ModelError, match=r"blk.0.attn_v.weight has type Q8_K, which the gguf package cannot"):
        weights.load(source, torch.float32)


def test_missing_unknown_and_misshapen_weights(tiny_gguf):
    whole = tiny_gguf.tensors()
    part = {name: value for name, value in whole.items() if "ffn_up" not in name}
    with pytest.raises(ModelError, match=r"lacks 2 weights: layers.0.up, layers.1.up"):
        weights.load(describe(str(tiny_gguf(part))), torch.float32)
    more = whole | {"blk.0.attn_sinks.weight": np.ones(64, np.float32)}
    with pytest.raises(ModelError, match=r"1 weights of another architecture: blk.0.attn_sinks.weight"):
        weights.load(describe(str(tiny_gguf(more))), torch.float32)
    bent = whole | {"blk.1.ffn_up.weight": np.ones((500, 256), np.float32)}
    with pytest.raises(ModelError, match=r"layers.1.up has shape \[500, 256\], the config says \[512, 256\]"):
        weights.load(describe(str(tiny_gguf(bent))), torch.float32)


def test_the_embedded_model_is_whole(embedded, embedded_weights):
    assert sum(tensor.numel() for tensor in embedded_weights.values()) == 134_515_008
    for name, shape in shapes(embedded.config).items():
        tensor = embedded_weights[name]
        assert tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()
        assert tensor.isfinite().all() and tensor.std() > 0


# --- Hugging Face directories


def hf_model(directory, shard="1GB", dtype=torch.float32, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=101, **changes,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


THEIRS = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
}


def assert_equal_to(model: LlamaForCausalLM, loaded: dict[str, torch.Tensor]) -> None:
    theirs = model.state_dict()
    for ours, tensor in loaded.items():
        kind, _, rest = ours.partition(".")
        whole = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
        layer, _, part = rest.partition(".")
        name = f"model.layers.{layer}.{THEIRS[part]}" if kind == "layers" else whole[kind]
        assert torch.equal(tensor, theirs[name]), ours


@pytest.mark.parametrize(
    ("shard", "changes"),
    [
        ("1GB", {}),
        ("40KB", {}),
        ("40KB", {"tie_word_embeddings": True}),
        ("1GB", {"attention_bias": True}),
        ("1GB", {"head_dim": 16}),
    ],
)
def test_hugging_face_directory(tmp_path, shard, changes):
    model = hf_model(tmp_path, shard, **changes)
    source = describe(str(tmp_path))
    assert len(source.files) == 1 if shard == "1GB" else len(source.files) > 3
    loaded = weights.load(source, torch.float32)
    num_tensors = 2 + 3 * (13 if changes.get("attention_bias") else 9) + (not changes.get("tie_word_embeddings"))
    assert len(loaded) == num_tensors
    assert_equal_to(model, loaded)


def test_dtype_is_kept_or_converted(tmp_path):
    model = hf_model(tmp_path, dtype=torch.bfloat16)
    source = describe(str(tmp_path))
    assert source.config.dtype == "bfloat16"
    assert_equal_to(model, weights.load(source, torch.bfloat16))
    assert_equal_to(model.float(), weights.load(source, torch.float32))


def test_a_head_that_the_config_would_ignore_is_refused_unless_it_is_the_embedding(tmp_path):
    """transformers computes with such a head, whatever config.json says."""
    model = hf_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"a head that is not its embedding.* set it to false"):
        weights.load(describe(str(tmp_path)), torch.float32)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = weights.load(describe(str(tmp_path)), torch.float32)
    assert "lm_head" not in loaded
    assert_equal_to(model, loaded)


def test_a_bias_of_zeros_that_the_model_has_not_is_no_weight(tmp_path):
    """Quantized Llama models have them."""
    model = hf_model(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    biases = {f"model.layers.0.{module}.bias": torch.zeros(48) for module in ("self_attn.q_proj", "mlp.gate_proj")}
    save_file(tensors | biases, tmp_path / "model.safetensors")
    loaded = weights.load(describe(str(tmp_path)), torch.float32)
    assert loaded.keys() == shapes(describe(str(tmp_path)).config).keys()
    assert_equal_to(model, loaded)
    biases["model.layers.0.mlp.gate_proj.bias"][7] = 1e-6
    save_file(tensors | biases, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 weights of another architecture: model\.layers\.0\.mlp\.gate_proj\.bias"):
        weights.load(describe(str(tmp_path)), torch.float32)


def test_damaged_safetensors(tmp_path):
    hf_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a whole safetensors file") as error:
        weights.load(describe(str(tmp_path)), torch.float32)
    assert "\n" not in str(error.value)


def test_tensors_that_are_no_weights_are_refused(tmp_path):
    model = hf_model(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    for changed, words in (
        ({name: tensors[name].to(torch.uint8)}, f"{name} is of type uint8"),
        ({"model.layers.1": torch.zeros(2)}, "1 weights of another architecture: model.layers.1$"),
    ):
        save_file(tensors | changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            weights.load(describe(str(tmp_path)), torch.float32)


def test_a_lost_shard(tmp_path):
    hf_model(tmp_path, "40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    lost = index["weight_map"]["model.norm.weight"]
    (tmp_path / lost).unlink()
    with pytest.raises(ModelError, match=lost):
        describe(str(tmp_path))


# --- dummy


def test_dummy_weights_follow_the_seed(tmp_path):
    hf_model(tmp_path)
    first, again, other = (weights.load(describe(str(tmp_path), "dummy", seed), torch.float32) for seed in (1, 1, 2))
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].ndim == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert not torch.equal(first["layers.0.q"], first["layers.1.q"])
    assert 0.9 < first["layers.0.gate"].std() * 48**0.5 < 1.1 and torch.all(first["norm"] == 1)


def test_progress_counts_bytes_tensor_by_tensor(tmp_path):
    hf_model(tmp_path)
    calls = []
    loaded = weights.load(describe(str(tmp_path)), torch.float32, progress=lambda *call: calls.append(call))
    sizes = [tensor.nbytes for tensor in loaded.values()]
    assert calls == [(done, sum(sizes)) for done in accumulate(sizes)]
