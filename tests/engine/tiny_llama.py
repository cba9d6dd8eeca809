"""Tiny random Llama models, as transformers builds them and as ours."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from attention.choice.choose import choose
from engine.checkpoint.hf_config import from_hf
from engine.model.decoder import Model
from engine.model.model_config import ModelConfig
from engine.step.inputs import InputBuilder, Row
from engine.step.runner import Runner

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BLOCK_SIZE = 16

_ours = {
    "embed_tokens.weight": "embed",
    "norm.weight": "norm",
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


def tiny(
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 32,
    tied: bool = True,
    rope_scaling: dict | None = None,
    bias: bool = False,
    layers: int = 3,
) -> LlamaForCausalLM:
    """A random transformers model in float32, its norms and biases random too so that none can be left out."""
    torch.set_num_threads(1)
    torch.manual_seed(heads * 1000 + head_size)
    config = LlamaConfig(
        hidden_size=144,  # a multiple of 3, 6, 8 and 9 heads; the head size is free
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        intermediate_size=128,
        vocab_size=211,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attention_bias=bias,
        initializer_range=0.15,
        rope_parameters={"rope_theta": 10_000.0, **(rope_scaling or {"rope_type": "default"})},
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def our_config(theirs: LlamaForCausalLM) -> ModelConfig:
    return from_hf(theirs.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})


def our_weights(theirs: LlamaForCausalLM) -> dict[str, Tensor]:
    return dict(_renamed(theirs))


def _renamed(theirs: LlamaForCausalLM) -> Iterator[tuple[str, Tensor]]:
    for name, weight in theirs.state_dict().items():
        name = name.removeprefix("model.")
        if name == "lm_head.weight":
            if not theirs.config.tie_word_embeddings:
                yield "lm_head", weight
            continue
        layer = ""
        if name.startswith("layers."):
            _, index, name = name.split(".", 2)
            layer = f"layers.{index}."
        bias = "_bias" if name.endswith(".bias") else ""
        key = name if name in _ours else name.rpartition(".")[0]
        yield layer + _ours[key] + bias, weight


def runner(theirs: LlamaForCausalLM, backend: str = "torch", num_blocks: int = 64) -> Runner:
    """Ours with the same weights in the same dtype; the pool starts as NaN: what is not written must not be read."""
    config = our_config(theirs)
    model = Model(config, our_weights(theirs), choose(backend, "cpu"))
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    return Runner(model, torch.full(shape, torch.nan, dtype=model.dtype), BLOCK_SIZE)


def logits_of(ours: Runner, rows: list[Row]) -> Tensor:
    """Logits of every token of the step, in the order of `rows`."""
    inputs = InputBuilder(BLOCK_SIZE, ours.device, groups=ours.model.groups).build(rows)
    every = torch.arange(len(inputs.token_ids))
    states = {} if inputs.states is None else {"states": inputs.states}
    logits = ours.model.forward(inputs.token_ids, inputs.batch, ours.kv_pool, every, others=inputs.others, **states)
    parts = dict(zip(inputs.order, logits.split(inputs.batch.q_lens), strict=True))
    return torch.cat([parts[i] for i in range(len(rows))])
