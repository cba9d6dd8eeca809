"""ModelConfig: the shape of a decoder, read from a Hugging Face config.json or from GGUF metadata.

The Llama family only: RMSNorm, half-split RoPE, grouped-query attention, SwiGLU. Whatever would change the mathematics
and is not implemented (another activation, another RoPE scaling, quantised Hugging Face weights) is refused here, in
one line, before a byte of weights is read. No torch: a store node needs the geometry and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.gguf_file import GGUFFile
from engine.model_error import ModelError

ARCHITECTURES = ("LlamaForCausalLM",)
"""What `architectures` in config.json may name; GGUF says `llama`."""

SCALINGS = ("linear", "llama3")
"""RoPE scalings the model implements, besides none."""

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes in elements, lengths in tokens."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """None, or config.json's rope parameters with "rope_type" one of SCALINGS:
    linear {"factor"}; llama3 {"factor"} and the keys of LLAMA3_SCALING."""
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    attention_bias: bool = False
    dtype: str = "float32"
    """How most of the checkpoint's weights are stored: a torch dtype name, or a GGUF type such as "q4_1"."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "intermediate_size"):
            _check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, must be positive")
        _check(self.vocab_size >= 1, f"vocab_size is {self.vocab_size}, must be positive")
        _check(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly",
        )
        _check(self.head_size % 2 == 0, f"head size {self.head_size} is odd: RoPE rotates pairs")
        if self.rope_scaling is not None:
            kind = self.rope_scaling.get("rope_type")
            _check(kind in SCALINGS, f"RoPE scaling {kind!r} is not implemented; known: none, {', '.join(SCALINGS)}")
            wanted = {"factor", *(LLAMA3_SCALING if kind == "llama3" else ())}
            missing = sorted(wanted - self.rope_scaling.keys())
            _check(not missing, f"RoPE scaling {kind!r} lacks {', '.join(missing)}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From config.json and, for its stop tokens, generation_config.json. Raises ModelError."""
        _check_family(config)
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_theta = float(rope.pop("rope_theta", config.get("rope_theta", 10_000.0)))
        rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))  # "type" is the spelling before 4.43
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_size=int(config.get("head_dim") or hidden // heads),
                intermediate_size=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                rope_theta=rope_theta,
                rope_scaling=None if rope["rope_type"] == "default" else rope,
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                bos_token_id=config.get("bos_token_id"),
                eos_token_ids=_token_ids((generation or {}).get("eos_token_id"), config.get("eos_token_id")),
                attention_bias=bool(config.get("attention_bias", False)),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            )
        except KeyError as error:
            raise ModelError(f"config.json has no {error}: not the configuration of a Llama model") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"config.json holds an impossible value: {error}") from None

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        """From the metadata of a GGUF file and its list of tensors. Raises ModelError."""
        architecture = file.metadata.get("general.architecture")
        _check(
            architecture == "llama",
            f"{file.path.name}: GGUF architecture {architecture!r} is not supported; supported: 'llama'",
        )
        heads, hidden = file.number("llama.attention.head_count"), file.number("llama.embedding_length")
        head_size = int(file.number("llama.attention.key_length", hidden // max(heads, 1)))
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            size = file.number(key, head_size)
            _check(size == head_size, f"{file.path.name}: {key} is {size}, only the head size {head_size} works")
        _check(file.number("llama.expert_count", 0) == 0, f"{file.path.name}: mixture of experts is not supported")
        if "token_embd.weight" not in file.tensors:
            raise ModelError(f"{file.path.name}: no tensor token_embd.weight; the file is not a whole Llama model")
        return cls(
            num_layers=int(file.number("llama.block_count")),
            hidden_size=int(hidden),
            num_heads=int(heads),
            num_kv_heads=int(file.number("llama.attention.head_count_kv", heads)),
            head_size=head_size,
            intermediate_size=int(file.number("llama.feed_forward_length")),
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            rope_theta=float(file.number("llama.rope.freq_base", 10_000.0)),
            rope_scaling=_gguf_scaling(file, head_size),
            rms_norm_eps=float(file.number("llama.attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in file.tensors,
            max_position_embeddings=int(file.number("llama.context_length")),
            bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_token_ids(
                *(file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
            ),
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            dtype=file.main_type(),
        )


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ModelError(message)


def _check_family(config: Mapping[str, Any]) -> None:
    named = config.get("architectures") or (["LlamaForCausalLM"] if config.get("model_type") == "llama" else [])
    _check(
        any(name in ARCHITECTURES for name in named),
        f"architecture {', '.join(named) or config.get('model_type')!r} is not supported; "
        f"supported: {', '.join(ARCHITECTURES)}",
    )
    for key, implemented in (("hidden_act", "silu"), ("mlp_bias", False), ("quantization_config", None)):
        value = config.get(key, implemented)
        _check(value == implemented, f"{key} {value!r} in config.json is not supported; only {implemented!r} is")


def _token_ids(*values: int | Iterable[int] | None) -> tuple[int, ...]:
    """All of them in order, each once."""
    ids: dict[int, None] = {}
    for value in values:
        if value is not None:
            ids.update(dict.fromkeys([value] if isinstance(value, int) else value))
    return tuple(ids)


def _gguf_scaling(file: GGUFFile, head_size: int) -> dict[str, Any] | None:
    """GGUF names linear scaling in its metadata but stores Llama 3's rule as a tensor of per-frequency divisors."""
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" not in file.tensors:
        linear = {"rope_type": "linear", "factor": float(file.number("llama.rope.scaling.factor", 1.0))}
        return None if kind == "none" else linear if kind == "linear" else {"rope_type": kind}
    divisors = np.frombuffer(file.raw("rope_freqs.weight"), "<f4")
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_SCALING}
    expected = llama3_divisors(scaling, float(file.number("llama.rope.freq_base", 10_000.0)), head_size)
    _check(
        divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3),
        f"{file.path.name}: rope_freqs.weight does not follow Llama 3's rule; no other is implemented",
    )
    return scaling


def llama3_divisors(scaling: Mapping[str, Any], theta: float, head_size: int) -> np.ndarray:
    """[head_size / 2] by what Llama 3's rule divides each RoPE frequency: 1 for short wavelengths, `factor` for long
    ones, and between the two a blend that is linear in the inverse."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))
