"""The part of a ModelConfig about layers with a state (engine/model/delta.py). Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

STATE_ITEM = 4
"""Bytes of an element of the matrices, which are float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Layers with a gated delta rule instead of attention (Qwen3-Next, Kimi Linear). Sizes in elements."""

    layers: tuple[int, ...]
    """Of the model, those that have it."""
    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    kernel: int
    """Tokens that the convolution before the rule sees."""
    by_channel: bool = False
    """Every channel of a key has a decay, and gates are products of two matrices (Kimi Linear)."""

    @property
    def keys(self) -> int:
        """Of all heads' keys, and of their queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def parameters(self) -> tuple[int, int]:
        """(of a layer's matrices for each element of the hidden state, others): without norms and biases."""
        if self.by_channel:
            of_hidden = self.channels + self.value_heads + self.key_size + self.value_size + self.values
            others = self.key_size * self.keys + self.value_size * self.values
            return of_hidden, others + self.channels * self.kernel
        return self.channels + 2 * (self.values + self.value_heads), self.channels * self.kernel

    @property
    def matrix(self) -> int:
        """Of a layer's state, without the last inputs of the convolution."""
        return self.value_heads * self.key_size * self.value_size

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of the state of one layer, whose last inputs of the convolution are of `item_bytes` each."""
        inputs = (self.kernel - 1) * self.channels * item_bytes
        return STATE_ITEM * (self.matrix + -(-inputs // STATE_ITEM))

    def problem(self, num_layers: int) -> str | None:
        """Why these sizes are impossible; None if they are not."""
        for key, size in (
            ("linear_num_key_heads", self.key_heads),
            ("linear_key_head_dim", self.key_size),
            ("linear_num_value_heads", self.value_heads),
            ("linear_value_head_dim", self.value_size),
        ):
            if size < 1:
                return f"{key} is {size}, must be positive"
        if self.kernel < 2:
            return f"linear_conv_kernel_dim is {self.kernel}, must be 2 or more"
        if self.value_heads % self.key_heads:
            return f"linear_num_value_heads is {self.value_heads}, not a multiple of {self.key_heads} key heads"
        if len(self.layers) >= num_layers:
            return "layer_types has no full_attention: prefixes need at least one layer with keys and values"
        return None
