"""Tiny Llama-like models with a head in the manner of EAGLE-3, in the folder `head` of the model's directory.

A random head guesses nothing. So there is also a constructed pair whose head guesses well. Of the model's three layers
the first two add nothing, and its embeddings are small: its output is that of the last layer's attention and MLP, which
normalise the embedding first. The head has the same layer, takes the next token's embedding and nothing of the model's
inner layers, because its norm of these is zero. So at position i it computes nearly what the model computes at i + 1,
but without the first token: it is right as often as that makes no difference, and only with the KV of the others. It
does not know the first tokens of the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.tiny_families import save

SMALL = 0.02
UNKNOWN = 11
"""Tokens at the begin of the vocabulary."""

Weights = dict[str, Tensor]


def save_random(directory: Path) -> tuple[PreTrainedModel, dict[str, Any], Weights]:
    """The model, and the head's configuration and weights under their published names."""
    model = save("mistral-full", directory)
    torch.manual_seed(9)
    hidden, heads, kv, wide, known = 96, 4 * 32, 2 * 32, 72, 150
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (wide, hidden),
        "midlayer.mlp.up_proj": (wide, hidden),
        "midlayer.mlp.down_proj": (hidden, wide),
        "lm_head": (known, hidden),
    }
    weights = {f"{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
    weights |= {f"{name}.weight": 1 + torch.randn(hidden) * 0.2 for name in norms}
    tokens = torch.randperm(211)[:known].sort().values
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "intermediate_size": wide,
        "vocab_size": 211,
        "draft_vocab_size": known,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    }
    _write(directory, model, config, weights, tokens)
    return model, config, weights


def save_agreeing(directory: Path, **more: Any) -> PreTrainedModel:
    """The constructed pair."""
    model = save("mistral-full", directory, num_hidden_layers=3, **more)
    for layer in model.model.layers[:2]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding, last = model.get_input_embeddings().weight, model.model.layers[2]
    torch.nn.init.normal_(embedding[0])  # the padding's is zero
    embedding.mul_(SMALL / embedding.square().mean(-1, keepdim=True).sqrt())
    model.save_pretrained(directory)
    weights = {f"layers.0.{name}": tensor for name, tensor in last.state_dict().items()}
    for name in ("q", "k", "v"):
        of_embedding = weights[f"layers.0.self_attn.{name}_proj.weight"]
        weights[f"layers.0.self_attn.{name}_proj.weight"] = torch.cat((of_embedding, of_embedding * 0), 1)
    hidden, vocab = embedding.shape[1], len(embedding)
    weights |= {
        "fc.weight": torch.randn(hidden, 3 * hidden),
        "layers.0.hidden_norm.weight": torch.zeros(hidden),
        "norm.weight": model.model.norm.weight,
        "lm_head.weight": model.lm_head.weight[UNKNOWN:],
    }
    of_model = model.config
    config = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
        "hidden_size": hidden,
        "intermediate_size": of_model.intermediate_size,
        "vocab_size": vocab,
        "draft_vocab_size": vocab - UNKNOWN,
        "rms_norm_eps": of_model.rms_norm_eps,
        "rope_theta": of_model.rope_parameters["rope_theta"],
    }
    _write(directory, model, config, weights, torch.arange(UNKNOWN, vocab))
    return model


def _write(directory: Path, model: PreTrainedModel, config: dict[str, Any], weights: Weights, tokens: Tensor) -> None:
    weights["d2t"] = tokens - torch.arange(len(tokens))
    weights["t2d"] = torch.isin(torch.arange(model.config.vocab_size), tokens)
    (directory / "head").mkdir(exist_ok=True)
    (directory / "head" / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    save_file(contiguous, directory / "head" / "model.safetensors", {"format": "pt"})
