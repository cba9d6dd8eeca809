"""`quantization_config` of a Hugging Face checkpoint with matrices in 4 bits or in bytes.

    awq                                       AutoAWQ: 4 bits in groups of inputs
    gptq                                      AutoGPTQ, GPTQModel: the same
    compressed-tensors, pack-quantized        llm-compressor: the same
    compressed-tensors, int-quantized         llm-compressor: W8A8, bytes with a scale for each output
    compressed-tensors, float-quantized       llm-compressor: fp8, a scale for each output, or for 128 x 128 elements
    fp8                                       DeepSeek, Qwen: fp8, a scale for 128 x 128 elements or for all of them
    mxfp4                                     gpt-oss: floats of 4 bits with a power of two for 32 inputs
    compressed-tensors, mxfp4-pack-quantized  llm-compressor: the same

engine/checkpoint/packed_weights.py, byte_weights.py and mxfp4_weights.py read the tensors. What is not served is
refused by the name of its key. Types of activations are checked, and their stored scales are not needed: rows that meet
int8 weights are rounded by their own largest number, rows that meet fp8 weights are not rounded, and rows that meet
mxfp4 weights are rounded to 8 bits also where the checkpoint asks for 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.model.model_error import ModelError

Json = Mapping[str, Any]

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4")


@dataclass(frozen=True, slots=True)
class Quantization:
    """Matrices in 4 bits."""

    method: str  # of METHODS
    group_size: int  # inputs with one scale; -1: all of them
    zero_offset: int = 0  # added to the stored zeros of gptq


@dataclass(frozen=True, slots=True)
class ByteQuantization:
    """Matrices in bytes."""

    kind: str  # int8 or fp8
    strategy: str  # one scale for: "tensor", "channel" (an output), "block" (128 x 128 elements)


@dataclass(frozen=True, slots=True)
class Mxfp4Quantization:
    """Matrices in MXFP4."""

    method: str  # mxfp4 or compressed-tensors


AnyQuantization = Quantization | ByteQuantization | Mxfp4Quantization


def quantization_of(config: Json) -> AnyQuantization | None:
    """That of config.json; None without one. Raises ModelError."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise _refused("", found, "a JSON object")
    method = _value(found, "quant_method", *METHODS)
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    if method == "fp8":
        return _fp8(found)
    if method == "mxfp4":
        return Mxfp4Quantization(method)
    bits = "w_bit" if "w_bit" in found and "bits" not in found else "bits"
    _value(found, bits, 4)
    group_size = _group_size(found, "q_group_size" if "q_group_size" in found else "group_size")
    if method == "awq":
        _value(found, "version", "gemm", "GEMM", None)
        return Quantization(method, group_size)
    format_ = _value(found, "checkpoint_format", "gptq", "gptq_v2", None)
    return Quantization(method, group_size, 0 if format_ == "gptq_v2" else 1)


def _fp8(found: Json) -> ByteQuantization:
    _value(found, "fmt", "e4m3", None)
    _value(found, "activation_scheme", "dynamic", "static", None)
    block = _value(found, "weight_block_size", [128, 128], None)
    return ByteQuantization("fp8", "tensor" if block is None else "block")


def _compressed_tensors(found: Json) -> AnyQuantization:
    format_ = _value(found, "format", "pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized")
    _value(found, "kv_cache_scheme", None)
    _value(found, "transform_config", None, {})
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused("config_groups", groups, "an object with one group")
    name, group = next(iter(groups.items()))
    at = f"config_groups.{name}."
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refused(f"{at}weights", weights, "an object")
    _value(group, "targets", ["Linear"], prefix=at)
    _value(group, "output_activations", None, prefix=at)
    _value(weights, "symmetric", True, prefix=f"{at}weights.")
    if format_ == "pack-quantized":
        return _packed(group, weights, at)
    if format_ == "mxfp4-pack-quantized":
        return _mxfp4(group, weights, at)
    return _bytes(group, weights, at, "int8" if format_ == "int-quantized" else "fp8")


def _packed(group: Json, weights: Json, prefix: str) -> Quantization:
    _value(group, "input_activations", None, prefix=prefix)
    at = f"{prefix}weights."
    _value(weights, "num_bits", 4, prefix=at)
    _value(weights, "type", "int", prefix=at)
    _value(weights, "actorder", None, "static", "weight", False, prefix=at)  # these have no g_idx
    strategy = _value(weights, "strategy", "group", "channel", prefix=at)
    return Quantization("compressed-tensors", -1 if strategy == "channel" else _group_size(weights, "group_size", at))


def _mxfp4(group: Json, weights: Json, prefix: str) -> Mxfp4Quantization:
    at, rows = f"{prefix}weights.", group.get("input_activations")
    for found, where in ((weights, at), (rows, f"{prefix}input_activations.")):
        if found is None:
            continue
        if not isinstance(found, Mapping):
            raise _refused(f"{prefix}input_activations", found, "an object")
        _value(found, "num_bits", 4, *([] if found is weights else [8]), prefix=where)
        _value(found, "type", "float", prefix=where)
    _value(weights, "strategy", "group", prefix=at)
    _value(weights, "group_size", 32, prefix=at)
    return Mxfp4Quantization("compressed-tensors")


def _bytes(group: Json, weights: Json, prefix: str, kind: str) -> ByteQuantization:
    type_, at = "int" if kind == "int8" else "float", f"{prefix}weights."
    _value(weights, "num_bits", 8, prefix=at)
    _value(weights, "type", type_, prefix=at)
    strategy: str = _value(weights, "strategy", "channel", "tensor", *(["block"] if kind == "fp8" else []), prefix=at)
    if strategy == "block":
        _value(weights, "block_structure", [128, 128], prefix=at)
    rows = group.get("input_activations")
    if rows is not None or kind == "int8":  # rows that meet int8 weights are rounded: only where the checkpoint does it
        if not isinstance(rows, Mapping):
            raise _refused(f"{prefix}input_activations", rows, "an object")
        _value(rows, "num_bits", 8, prefix=f"{prefix}input_activations.")
        _value(rows, "type", type_, prefix=f"{prefix}input_activations.")
    return ByteQuantization(kind, strategy)


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
