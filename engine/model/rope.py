"""The angles of rotary position embedding; attention/rotary.py applies them.

    angle = position * frequency[i]      frequency[i] = theta^(-2i / head_size) / divisor[i]

cos and sin are multiplied by a magnitude. rope_scaling.py computes divisors and magnitude for context extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.rope_scaling import divisors, magnitude


class Rope:
    """The rotary embedding of a model's layers (Gemma 3 has two: one for windowed layers, one for the others)."""

    def __init__(self, head_size: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device) -> None:
        exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        frequency = 1.0 / theta**exponent / torch.from_numpy(divisors(scaling, theta, head_size)).float()
        self.frequency = frequency.to(device)  # [head_size / 2] float32, radians per token
        self.magnitude = magnitude(scaling)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, head_size / 2] float32 of a step's positions [T]."""
        angle = positions.float()[:, None] * self.frequency
        return angle.cos() * self.magnitude, angle.sin() * self.magnitude
