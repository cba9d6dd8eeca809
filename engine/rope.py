"""The angles of rotary position embedding; attention/rotary.py applies them.

    angle = position * frequency[i]      frequency[i] = theta^(-2i / head_size) / divisor[i]

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


def angles(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_size / 2] float32 of a step's positions [T]."""
    angle = positions.float()[:, None] * frequency
    return angle.cos(), angle.sin()
