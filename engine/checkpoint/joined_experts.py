"""gpt-oss' experts in floats: all of a layer in one tensor, matrices [in, out], columns of gate and up in turns.

    mlp.experts.gate_up_proj        [E, hidden, 2 * size]      column 2 i is gate's i-th, column 2 i + 1 is up's
    mlp.experts.gate_up_proj_bias   [E, 2 * size]
    mlp.experts.down_proj           [E, size, hidden]
    mlp.experts.down_proj_bias      [E, hidden]

mxfp4_weights.py reads the same experts in 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

MIDDLE = ".mlp.experts."
FORMS = {
    "gate_up_proj": ("", 3, ("gate", "up")),
    "gate_up_proj_bias": ("_bias", 2, ("gate", "up")),
    "down_proj": ("", 3, ("down",)),
    "down_proj_bias": ("_bias", 2, ("down",)),
}
"""End of a tensor's name -> (end of ours, its axes, our names for its columns in turn)."""


@dataclass(frozen=True, slots=True)
class Part:
    """A weight of one expert: every `step`-th column from `first` on."""

    file: Any
    name: str
    expert: int
    first: int
    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        _, *inputs, outputs = self.file.get_slice(self.name).get_shape()
        return (len(range(self.first, outputs, self.step)), *inputs)

    def read(self) -> Tensor:
        """[out, in] or [out]; it owns its memory."""
        whole: Tensor = self.file.get_slice(self.name)[self.expert]
        return whole[..., self.first :: self.step].t().contiguous().clone()


def parts_of(file: Any, name: str) -> dict[str, Part]:
    """Our names of the weights in a tensor of an open safetensors file; empty if it is no tensor of all experts."""
    layer, found, end = name.removeprefix("model.layers.").partition(MIDDLE)
    if not found or end not in FORMS:
        return {}
    suffix, axes, turns = FORMS[end]
    shape = file.get_slice(name).get_shape()
    if len(shape) != axes:
        return {}
    return {
        f"layers.{layer}.experts.{expert}.{ours}{suffix}": Part(file, name, expert, first, len(turns))
        for expert in range(shape[0])
        for first, ours in enumerate(turns)
    }
