"""The groups and the weights of a model, from its config.json.

Families that the engine runs are read by engine/checkpoint/hf_config.py, the others by the files of FAMILIES. For
these, every key must be known: an unknown one could change the geometry, and is refused by its name. The weights of
layers that draft tokens (MTP) are not counted; the KV of DeepSeek-V3's is if Types.mtp says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from engine.checkpoint.hf_config import from_hf
from engine.model.model_config import check
from engine.model.model_error import ModelError
from lab.geometry.architecture import Part, Weights
from lab.geometry.channels import CHANNELS
from lab.geometry.delta import DELTA
from lab.geometry.families import COMMON, Family, Json, Types, bytes_of, heads_part
from lab.geometry.latent import LATENT
from lab.geometry.sinks import SINKS

FAMILIES = {
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "GptOssForCausalLM": SINKS,
    "KimiLinearForCausalLM": CHANNELS,
    "Qwen3NextForCausalLM": DELTA,
}
"""By the names in `architectures` of config.json."""

BFLOAT16 = Types()

T = TypeVar("T")


def parts_of(config: Json, types: Types = BFLOAT16) -> tuple[Part, ...]:
    """The groups, those that grow first. Raises ValueError."""

    def parts() -> tuple[Part, ...]:
        family = _family(config)
        return _plain_parts(config, types) if family is None else family.parts(config, types)

    return _read(parts)


def weights_of(config: Json) -> Weights:
    """Raises ValueError."""

    def weights() -> Weights:
        family = _family(config)
        return _plain_weights(config) if family is None else family.weights(config)

    return _read(weights)


def _family(config: Json) -> Family | None:
    """None: one of the engine's, or an unknown one. Raises ModelError."""
    named = config.get("architectures") or []
    known = next((name for name in named if name in FAMILIES), None)
    if known is None:
        return None
    unknown = sorted(set(config) - COMMON - FAMILIES[known].keys)
    check(not unknown, f"{', '.join(unknown)} in config.json is not known: it may change the KV of {known}")
    return FAMILIES[known]


def _read(made: Callable[[], T]) -> T:
    try:
        return made()
    except ModelError as error:
        raise ValueError(str(error)) from error
    except KeyError as error:
        raise ValueError(f"config.json has no {error}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"config.json contains an impossible value: {error}") from None


def _plain_parts(config: Json, types: Types) -> tuple[Part, ...]:
    model = from_hf(config)
    layers = Counter(model.window(layer) for layer in range(model.num_layers))
    sizes = model.num_heads, model.num_kv_heads, model.head_size
    return tuple(heads_part(layers[window], window, *sizes, types=types) for window in sorted(layers))


def _plain_weights(config: Json) -> Weights:
    model = from_hf(config)
    sparse = sum(model.has_experts(layer) for layer in range(model.num_layers))
    experts = sparse * model.num_experts * 3 * model.hidden_size * model.expert_size
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    shared_bytes, expert_bytes = bytes_of(config)
    return Weights(
        shared=model.num_parameters - experts - embedding,
        experts=experts,
        expert_share=model.experts_per_token / model.num_experts if model.num_experts else 0.0,
        embedding=embedding,
        shared_bytes=shared_bytes,
        expert_bytes=expert_bytes,
        experts_per_token=model.experts_per_token,
        routed_elements=sparse * model.hidden_size if model.num_experts else 0,
    )
