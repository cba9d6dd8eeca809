"""Rotary position embedding, half-split: element i of a head is rotated with element i + head_size / 2.

    angle = position * frequency[i]      frequency[i] = theta^(-2i / head_size) / divisor[i]

    out[i]     = x[i] cos - x[i + half] sin
    out[i + half] = x[i + half] cos + x[i] sin

The divisors are the context extension: all 1, all `factor` (linear), or Llama 3's blend by wavelength.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model_config import ModelConfig, llama3_divisors


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """[head_size / 2] float32, radians per token. Raises ValueError for an unknown scaling."""
    exponent = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling or {"rope_type": "default"}
    match scaling["rope_type"]:
        case "default":
            pass
        case "linear":
            frequency = frequency / scaling["factor"]
        case "llama3":
            divisors = llama3_divisors(scaling, config.rope_theta, config.head_size)
            frequency = frequency / torch.from_numpy(divisors).float()
        case kind:
            raise ValueError(f"RoPE scaling {kind!r} is not implemented; known: default, linear, llama3")
    return frequency.to(device)


def angles(positions: Tensor, frequency: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, head_size / 2] of a step's positions [T]; taken in float32, then rounded to the model's dtype
    as transformers does."""
    angle = positions.float()[:, None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_size] -> a new tensor of the same shape."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
