"""The angles of rotary position embedding; attention/rotary.py applies them.

    angle = position * frequency[i]      frequency[i] = theta^(-2i / head_size) / divisor[i]

cos and sin are multiplied by a magnitude. rope_scaling.py computes divisors and magnitude for context extension. If
only the first r elements of a head are rotated, its elements are in another order (engine/checkpoint/row_order.py),
in which these come first in both halves; the angle of the others is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.rope_scaling import divisors, magnitude


class Rope:
    """The rotary embedding of a model's layers (Gemma 3 has two: one for windowed layers, one for the others)."""

    def __init__(
        self,
        head_size: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        device: torch.device,
        unrotated: int = 0,
    ) -> None:
        """head_size: elements that are rotated; unrotated: further elements of a head."""
        exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        frequency = 1.0 / theta**exponent / torch.from_numpy(divisors(scaling, theta, head_size)).float()
        self.frequency = frequency.to(device)  # [head_size / 2] float32, radians per token
        self.magnitude = magnitude(scaling)
        self._still = unrotated // 2

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, (head_size + unrotated) / 2] float32 of a step's positions [T]."""
        angle = positions.float()[:, None] * self.frequency
        cos, sin = angle.cos() * self.magnitude, angle.sin() * self.magnitude
        if self._still:
            cos, sin = F.pad(cos, (0, self._still), value=1.0), F.pad(sin, (0, self._still))
        return cos, sin
