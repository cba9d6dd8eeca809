"""Quantization: `quantization_config` of a Hugging Face checkpoint whose matrices have 4 bits in groups of inputs.

    awq                                       AutoAWQ: qweight, qzeros, scales
    gptq                                      AutoGPTQ, GPTQModel: qweight, qzeros, scales, g_idx
    compressed-tensors, pack-quantized        llm-compressor: weight_packed, weight_scale, weight_shape

engine/checkpoint/packed_weights.py reads the tensors. What is not served is refused by the name of its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.model.model_error import ModelError

Json = Mapping[str, Any]

METHODS = ("awq", "gptq", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str  # of METHODS
    group_size: int  # inputs with one scale; -1: all of them
    zero_offset: int = 0  # added to the stored zeros of gptq


def quantization_of(config: Json) -> Quantization | None:
    """That of config.json; None without one. Raises ModelError."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise _refused("", found, "a JSON object")
    method = _value(found, "quant_method", *METHODS)
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    bits = "w_bit" if "w_bit" in found and "bits" not in found else "bits"
    _value(found, bits, 4)
    group_size = _group_size(found, "q_group_size" if "q_group_size" in found else "group_size")
    if method == "awq":
        _value(found, "version", "gemm", "GEMM", None)
        return Quantization(method, group_size)
    format_ = _value(found, "checkpoint_format", "gptq", "gptq_v2", None)
    return Quantization(method, group_size, 0 if format_ == "gptq_v2" else 1)


def _compressed_tensors(found: Json) -> Quantization:
    _value(found, "format", "pack-quantized")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused("config_groups", groups, "an object with one group")
    name, group = next(iter(groups.items()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refused(f"config_groups.{name}.weights", weights, "an object")
    at = f"config_groups.{name}.weights."
    _value(group, "targets", ["Linear"], prefix=f"config_groups.{name}.")
    _value(group, "input_activations", None, prefix=f"config_groups.{name}.")
    _value(weights, "num_bits", 4, prefix=at)
    _value(weights, "type", "int", prefix=at)
    _value(weights, "symmetric", True, prefix=at)
    _value(weights, "actorder", None, "static", "weight", False, prefix=at)  # these have no g_idx
    strategy = _value(weights, "strategy", "group", "channel", prefix=at)
    return Quantization("compressed-tensors", -1 if strategy == "channel" else _group_size(weights, "group_size", at))


def _group_size(found: Json, key: str, prefix: str = "") -> int:
    value = found.get(key)
    if type(value) is not int or (value != -1 and (value <= 0 or value % 32)):
        raise _refused(prefix + key, value, "a multiple of 32, or -1")
    return value


def _value(found: Json, key: str, *served: Any, prefix: str = "") -> Any:
    """found[key], one of `served`; a missing key is None."""
    value = found.get(key)
    if not any(type(value) is type(each) and value == each for each in served):
        raise _refused(prefix + key, value, ", ".join(map(repr, served)))
    return value


def _refused(key: str, value: object, served: str) -> ModelError:
    name = f"quantization_config.{key}" if key else "quantization_config"
    return ModelError(f"{name} {value!r} in config.json is not supported; supported: {served}")
