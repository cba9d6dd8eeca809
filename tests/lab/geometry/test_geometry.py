"""Published models: their KV and weights against known numbers, and what is refused."""

from __future__ import annotations

import orjson
import pytest

from engine.checkpoint.hf_config import from_hf
from lab.geometry.families import Types
from lab.geometry.find import architecture, find
from lab.geometry.published import PUBLISHED
from lab.geometry.read_config import parts_of, weights_of

KV = {  # bytes: of a token in groups that grow, of a window's token, of a state; of a token in uniform blocks
    "Llama-3-70B": (327_680, 0, 0, 327_680),
    "Llama-3-8B": (131_072, 0, 0, 131_072),
    "DeepSeek-V3": (70_272, 0, 0, 4_997_120),
    "Kimi-K2": (70_272, 0, 0, 2_498_560),
    "gpt-oss-120b": (36_864, 36_864, 0, 73_728),
    "Gemma-3-27B": (81_920, 425_984, 0, 507_904),
    "Qwen3-Next-80B": (24_576, 0, 77_266_944, 98_304),
    "Kimi-Linear-48B": (8_064, 0, 43_417_600, 552_960),
    "SmolLM2-135M": (23_040, 0, 0, 23_040),
}
PARAMETERS = {  # billions: all, and of one token (of the model cards)
    "Llama-3-70B": (70.6, 69.5),
    "Llama-3-8B": (8.03, 7.5),
    "DeepSeek-V3": (671, 37),
    "Kimi-K2": (1027, 32),
    "gpt-oss-120b": (116.8, 5.1),
    "Gemma-3-27B": (27.0, 27.0),
    "Qwen3-Next-80B": (80, 3.5),
    "Kimi-Linear-48B": (49.1, 3.1),
    "SmolLM2-135M": (0.1345, 0.1345),
}


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_the_kv_of_published_models(model):
    groups = [part.group for part in parts_of(model.config)]
    growing, sliding, states, uniform = KV[model.name]
    assert sum(group.token_bytes for group in groups if group.grows) == growing
    assert sum(group.token_bytes for group in groups if group.kind == "window") == sliding
    assert sum(group.checkpoint_bytes for group in groups) == states
    assert sum(part.uniform.token_bytes for part in parts_of(model.config)) == uniform


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_the_weights_of_published_models(model):
    weights, (parameters, active) = weights_of(model.config), PARAMETERS[model.name]
    assert weights.parameters / 1e9 == pytest.approx(parameters, rel=0.01)
    assert weights.active / 1e9 == pytest.approx(active, rel=0.03)
    assert 0.5 * weights.parameters < weights.nbytes <= 2 * weights.parameters


def test_bytes_of_weights():
    stored = {model.name: weights_of(model.config).nbytes / 1e9 for model in PUBLISHED}
    assert stored["Kimi-K2"] == pytest.approx(1027, rel=0.01), "fp8"
    assert stored["gpt-oss-120b"] == pytest.approx(65, rel=0.02), "experts in MXFP4; the checkpoint has 65 GB"
    assert stored["Qwen3-Next-80B"] == pytest.approx(160, rel=0.01)


V2 = find("DeepSeek-V3").config | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 60,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
}
LITE = V2 | {
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
}


@pytest.mark.parametrize(("config", "token_bytes", "billions"), [(V2, 69_120, 236), (LITE, 31_104, 15.7)])
def test_earlier_latent_models(config, token_bytes, billions):
    (part,) = parts_of(config)
    assert part.group.token_bytes == token_bytes
    assert weights_of(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_flops_of_latent_attention():
    """278.5 kFLOP for a pair and a layer on the row, 81.9 kFLOP after its expansion (128 heads)."""
    (part,) = parts_of(find("deepseek-v3").config)
    assert (part.decode_flops, part.prefill_flops) == (278_528, 81_920)


def test_other_types_of_kv():
    types = Types("float32", "bfloat16")
    assert parts_of(find("Kimi-K2").config, types)[0].group.token_bytes == 2 * 70_272
    full, state = (part.group for part in parts_of(find("Qwen3-Next-80B").config, types))
    assert full.token_bytes == 2 * 24_576
    assert state.state_bytes == 2 * 32 * 128 * 128 + 4 * 3 * 8192


def test_types_of_layers_may_be_listed():
    config = find("gpt-oss-120b").config
    listed = config | {"layer_types": ["sliding_attention"] * 30 + ["full_attention"] * 6}
    assert [(p.group.kind, p.group.layers) for p in parts_of(listed)] == [("full", 6), ("window", 30)]
    delta = find("Qwen3-Next-80B").config | {"layer_types": ["linear_attention", "full_attention"] * 24}
    assert [(p.group.kind, p.group.layers) for p in parts_of(delta)] == [("full", 24), ("state", 24)]


@pytest.mark.parametrize("name", ["Qwen3-Next-80B", "Kimi-Linear-48B"])
def test_the_engine_keeps_the_states_that_plans_count(name):
    config, groups = find(name).config, [part.group for part in parts_of(find(name).config)]
    model = from_hf({"intermediate_size": 5120} | dict(config))
    states = [group for group in groups if group.kind == "state"]
    assert [(group.layers, group.state_bytes) for group in states] == [(sum(model.states), model.state_bytes(2))]
    assert model.num_parameters == weights_of(config).parameters


def test_a_directory_of_a_family_of_the_engine(tmp_path):
    config = {
        "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "use_sliding_window": True,
        "sliding_window": 32, "max_window_layers": 3, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    found = architecture(str(tmp_path))
    assert found.name == tmp_path.name
    assert [(p.group.kind, p.group.layers, p.group.window) for p in found.parts] == [("full", 3, 0), ("window", 1, 32)]
    assert found.weights.parameters == from_hf(config).num_parameters and found.weights.shared_bytes == 4
    assert find(str(tmp_path / "config.json")).config == config


K2, OSS, NEXT = (dict(find(name).config) for name in ("Kimi-K2", "gpt-oss-120b", "Qwen3-Next-80B"))
REFUSED = [
    (K2 | {"index_topk": 2048}, "index_topk in config.json is not known"),
    (K2 | {"moe_layer_freq": 2}, "moe_layer_freq"),
    (OSS | {"layer_types": ["chunked_attention"] * 36}, "layer_types chunked_attention"),
    (OSS | {"layer_types": ["full_attention"] * 3}, "3 layer_types in config.json for 36 layers"),
    (NEXT | {"mlp_only_layers": [3]}, "mlp_only_layers"),
    (NEXT | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ({key: value for key, value in K2.items() if key != "kv_lora_rank"}, "has no 'kv_lora_rank'"),
    (K2 | {"num_hidden_layers": "many"}, "impossible value"),
    ({"architectures": ["UnheardOfForCausalLM"]}, "UnheardOfForCausalLM.* is not supported"),
    (K2 | {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_could_change_the_geometry_is_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        parts_of(config), weights_of(config)


def test_quantized_weights_do_not_change_the_kv():
    assert parts_of(K2 | {"quantization_config": {"quant_method": "awq"}}) == parts_of(K2)


def test_what_is_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"neither a directory .* Kimi-K2"):
        find("Kimi-K3")
    for text, words in ((b"{", "is not JSON"), (b"[]", "has no keys")):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(ValueError, match=words):
            find(str(tmp_path))
