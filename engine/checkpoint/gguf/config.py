"""from_gguf(): metadata and tensor list of a GGUF file -> ModelConfig."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.checkpoint.gguf.file import GGUFFile
from engine.model.model_config import ModelConfig, check, token_ids
from engine.model.model_error import ModelError
from engine.model.rope_scaling import LLAMA3_SCALING, llama3_divisors

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},  # also in Mistral's files
    "qwen2": {},
    "qwen3": {"qk_norm": True},
}
"""general.architecture -> the ModelConfig fields that all its files share."""


def from_gguf(file: GGUFFile) -> ModelConfig:
    """Raises ModelError."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path.name}: GGUF architecture {architecture!r} is not supported; "
            f"supported: {', '.join(map(repr, ARCHITECTURES))}"
        )

    def number(key: str, default: float | None = None) -> Any:
        return file.number(f"{architecture}.{key}", default)

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_size = int(number("attention.key_length", hidden // max(heads, 1)))
    for key in ("attention.value_length", "rope.dimension_count"):
        size = number(key, head_size)
        check(
            size == head_size,
            f"{file.path.name}: {architecture}.{key} is {size}, only the head size {head_size} works",
        )
    check(number("expert_count", 0) == 0, f"{file.path.name}: mixture of experts is not supported in GGUF files")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path.name}: no tensor token_embd.weight; the file is not a whole model")
    num_layers, window = int(number("block_count")), int(number("attention.sliding_window", 0))
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=int(hidden),
        num_heads=int(heads),
        num_kv_heads=int(number("attention.head_count_kv", heads)),
        head_size=head_size,
        intermediate_size=int(number("feed_forward_length")),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_position_embeddings=int(number("context_length")),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=token_ids(*(file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))),
        dtype=file.main_type(),
        rope_theta=float(number("rope.freq_base", 10_000.0)),
        rope_scaling=_scaling(file, architecture, head_size),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        windows=(window,) * num_layers if window else (),
        rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        **ARCHITECTURES[architecture],
    )


def _scaling(file: GGUFFile, architecture: str, head_size: int) -> dict[str, Any] | None:
    """GGUF names linear scaling in its metadata but stores Llama 3's rule as a tensor of per-frequency divisors. A
    factor without a type is linear, as in llama.cpp; files of 2023 have it under another key."""
    at = f"{architecture}.rope.scaling."
    factor = float(file.number(at + "factor", file.number(f"{architecture}.rope.scale_linear", 0.0)))
    kind = file.metadata.get(at + "type", "linear" if factor else "none")
    check(
        kind in ("none", "linear"),
        f"{file.path.name}: RoPE scaling {kind!r} is not implemented for GGUF files; known: none, linear",
    )
    linear = None if kind == "none" or factor in (0, 1) else {"rope_type": "linear", "factor": factor}
    if "rope_freqs.weight" not in file.tensors:
        return linear
    check(linear is None, f"{file.path.name}: a linear RoPE scaling and a table of divisors; only one of them works")
    divisors = np.frombuffer(file.raw("rope_freqs.weight"), "<f4")
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_SCALING}
    expected = llama3_divisors(scaling, float(file.number(f"{architecture}.rope.freq_base", 10_000.0)), head_size)
    check(
        divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3),
        f"{file.path.name}: rope_freqs.weight does not follow Llama 3's rule; no other is implemented",
    )
    return scaling
