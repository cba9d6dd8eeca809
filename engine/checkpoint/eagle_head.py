"""A head in the manner of EAGLE-3, in a Hugging Face directory of its own -> a part of a ModelConfig.

Its weights by our names (engine/checkpoint/eagle_weights.py reads them):

    fc                  [H, 3 H]
    attn_norm           [H]; input_layernorm, of the embedding
    hidden_norm         [H]
    q, k, v             [num_heads * head_size, 2 H], [num_kv_heads * head_size, 2 H] twice
    o                   [H, num_heads * head_size]
    mlp_norm            [H]; post_attention_layernorm
    gate, up, down      [intermediate, H] twice, [H, intermediate]
    norm                [H]
    head                [draft_vocab_size, H]; lm_head
    d2t                 [draft_vocab_size] int64, absent if both vocabularies are the same
    embed               [vocab_size, H]; absent: the model's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.checkpoint.model_source import ModelSource, hash_files, read_json, safetensors_files
from engine.model.eagle_config import Eagle
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError

LAYER = ("midlayer.", "layers.0.")
NAMES = {
    "fc.weight": "fc",
    "norm.weight": "norm",
    "lm_head.weight": "head",
    "d2t": "d2t",
    "embed_tokens.weight": "embed",
    "input_layernorm.weight": "attn_norm",
    "hidden_norm.weight": "hidden_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
OTHER_LAYERS = ("latent", "delta", "gated", "norm_plus_one", "rotary_size", "no_input_norms", "joint_qk_norm")
OTHER_SCALES = ("attention_soft_cap", "query_scale_size", "score_scale", "branch_scale", "logit_divisor")
"""Fields of models whose layers compute otherwise than a head's."""
COMPUTED = ("t2d", "rotary_emb.inv_freq")
"""What follows from the rest."""


def our_name(name: str) -> str:
    bare = name.removeprefix("model.")
    for layer in LAYER:
        bare = bare.removeprefix(layer)
    return NAMES.get(bare, name)


def shapes(sizes: Eagle, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all weights but d2t."""
    hidden, q, kv = model.hidden_size, model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    norms = dict.fromkeys(("attn_norm", "hidden_norm", "mlp_norm", "norm"), (hidden,))
    own = {"embed": (model.vocab_size, hidden)} if sizes.own_embedding else {}
    return {
        "fc": (hidden, len(sizes.taps) * hidden),
        **norms,
        "q": (q, 2 * hidden),
        "k": (kv, 2 * hidden),
        "v": (kv, 2 * hidden),
        "o": (hidden, q),
        "gate": (sizes.intermediate_size, hidden),
        "up": (sizes.intermediate_size, hidden),
        "down": (hidden, sizes.intermediate_size),
        "head": (sizes.vocab_size, hidden),
        **own,
    }


def config_of(config: Mapping[str, Any], model: ModelConfig, own_embedding: bool) -> Eagle:
    """From its config.json. Raises ModelError, a line without a subject, if it is not EAGLE-3's or does not fit."""
    named = [str(name) for name in config.get("architectures") or ()]
    of_eagle = config.get("eagle_config") or {}
    if not any("eagle3" in name.lower() for name in named):
        raise ModelError(f"architecture {', '.join(named) or config.get('model_type')} is not EAGLE-3's")
    plain = {"num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    fits = {
        "hidden_size": model.hidden_size,
        "target_hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "use_aux_hidden_state": True,
    }
    for key, wanted in (plain | fits).items():
        value = config.get(key, of_eagle.get(key))
        if value is not None and value != wanted:
            raise ModelError(f"{key} is {value!r}; only {wanted!r} works here")
    layers = config.get("eagle_aux_hidden_state_layer_ids") or of_eagle.get("eagle_aux_hidden_state_layer_ids")
    last = model.num_layers
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", config.get("rope_theta", 10_000.0)))
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    sizes = Eagle(
        taps=tuple(sorted({int(layer) for layer in layers or (2, last // 2, last - 3)})),
        intermediate_size=int(config.get("intermediate_size") or 0),
        vocab_size=int(config.get("draft_vocab_size") or model.vocab_size),
        norm_first=bool(config.get("norm_before_residual", False)),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        own_embedding=own_embedding,
    )
    if (wrong := sizes.problem(model.num_layers, model.vocab_size)) is not None:
        raise ModelError(wrong)
    return sizes


def with_head(source: ModelSource, model: str) -> ModelSource:
    """`source` with the head in the directory `model`; its fingerprint changes, because blocks have the KV of both.
    Raises ModelError."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(f"--speculative-model {model} is no directory with a config.json and the weights of a head")
    files = safetensors_files(folder)
    try:
        _check_model(source.config)
        sizes = config_of(read_json(folder / "config.json"), source.config, "embed" in _names(files))
    except ModelError as error:
        raise ModelError(f"--speculative-model {folder.name} does not fit {source.name}: {error}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"--speculative-model {folder.name} has an impossible value or a damaged file: {error}"
        ) from None
    hasher = blake2b(source.fingerprint.encode(), digest_size=16, person=b"mooncake-model")
    hash_files(hasher, files)
    config = replace(source.config, eagle=sizes)
    return replace(source, config=config, fingerprint=hasher.hexdigest(), head_files=files)


def _check_model(config: ModelConfig) -> None:
    """The layer of a head is one of Llama's, with the model's heads."""
    plain = ModelConfig.__dataclass_fields__
    for field in (*OTHER_LAYERS, *OTHER_SCALES):
        if getattr(config, field) != plain[field].default:
            raise ModelError("heads are served for models in the manner of Llama, Mistral and Qwen")


def _names(files: Sequence[Path]) -> set[str]:
    """Ours, of the weights in the files, from their headers. Raises ModelError for a damaged one."""
    found = set[str]()
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                found |= {our_name(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} is not a whole safetensors file ({error}): fetch it again") from None
    return found
