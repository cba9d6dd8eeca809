"""Products in one tensor each: rows of q, k and v (Phi-3), and of gate and up (GLM-4 too), one after the other.

self_attn.qkv_proj    [(num_heads + 2 num_kv_heads) * head_size, hidden]
mlp.gate_up_proj      [2 * intermediate, hidden]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from engine.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """A weight: rows of a tensor in a file."""

    file: Any
    name: str
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.file.get_slice(self.name).get_shape()
        return max(0, min(self.count, rows - self.first)), columns

    def read(self) -> Tensor:
        """[out, in]; it owns its memory."""
        found: Tensor = self.file.get_slice(self.name)[self.first : self.first + self.count]
        return found.clone()


def rows_of(file: Any, name: str, config: ModelConfig) -> dict[str, Rows]:
    """Our names of the weights in a tensor of an open safetensors file; empty if it has only one."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    found = {
        "self_attn.qkv_proj.weight": {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size},
        "mlp.gate_up_proj.weight": {"gate": config.intermediate_size, "up": config.intermediate_size},
    }.get(part, {})
    begins = accumulate(found.values(), initial=0)
    return {
        f"layers.{layer}.{ours}": Rows(file, name, first, count)
        for (ours, count), first in zip(found.items(), begins, strict=False)
    }
