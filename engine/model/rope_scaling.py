"""Context extension of rotary position embedding: the divisor of each frequency, and the scale of the result.

    frequency[i] = theta^(-2i / head_size) / divisor[i]

Scalings whose divisors depend on the request's length are not supported: the KV of a token would depend on later tokens
and could not be reused. "dynamic" is supported because it has no effect up to max_position_embeddings, the longest
request that is served. Does not import torch: a store node also checks configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", *LLAMA3_SCALING),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Implemented scalings, in addition to none, with their required keys."""


def problem(scaling: Mapping[str, Any]) -> str | None:
    """Why this scaling cannot be used; None if it can."""
    kind = scaling.get("rope_type")
    if kind not in SCALINGS:
        return f"RoPE scaling {kind!r} is not implemented; known: none, {', '.join(SCALINGS)}"
    missing = sorted(set(SCALINGS[kind]) - scaling.keys())
    if missing:
        return f"RoPE scaling {kind!r} lacks {', '.join(missing)}"
    for key in SCALINGS[kind]:
        if not isinstance(value := scaling[key], int | float) or not 0 < value < math.inf:
            return f"RoPE scaling {kind!r} has {key} {value!r}, which is no positive number"
    return None


def divisors(scaling: Mapping[str, Any] | None, theta: float, head_size: int) -> np.ndarray:
    """[head_size / 2] float64, for a scaling without `problem`."""
    match scaling["rope_type"] if scaling else "none":
        case "linear":
            assert scaling is not None
            return np.full(head_size // 2, float(scaling["factor"]))
        case "llama3":
            assert scaling is not None
            return llama3_divisors(scaling, theta, head_size)
        case "yarn":
            assert scaling is not None
            return yarn_divisors(scaling, theta, head_size)
    return np.ones(head_size // 2)


def magnitude(scaling: Mapping[str, Any] | None) -> float:
    """The factor of cos and sin; 1 except in YaRN, which sharpens attention over longer contexts."""
    if not scaling or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, all_dims = scaling["factor"], scaling.get("mscale_all_dim")
    if scaling.get("mscale") and all_dims:
        return mscale(factor, scaling["mscale"]) / mscale(factor, all_dims)
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """YaRN's growth of attention with the logarithm of the context."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def llama3_divisors(scaling: Mapping[str, Any], theta: float, head_size: int) -> np.ndarray:
    """The divisor of each frequency by Llama 3's rule: 1 for short wavelengths, `factor` for long ones, and a blend
    between the two that is linear in the inverse."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))


def yarn_divisors(scaling: Mapping[str, Any], theta: float, head_size: int) -> np.ndarray:
    """YaRN (Peng et al., arXiv 2309.00071, section 3.2): pairs that turn more than beta_fast times in the original
    context are unchanged; pairs that turn less than beta_slow times are divided by `factor`. A ramp over the pair's
    index, linear in the inverse, connects the two."""
    length = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return head_size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (pair_that_turns(scaling.get(key) or beta) for key, beta in (("beta_fast", 32), ("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    ramp = np.clip((np.arange(head_size // 2) - low) / ((high - low) or 0.001), 0, 1)
    return np.asarray(1 / (ramp / scaling["factor"] + 1 - ramp))
