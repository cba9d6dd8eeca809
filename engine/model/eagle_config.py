"""The part of a ModelConfig about a head that drafts. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.model.rope_scaling import problem as rope_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle:
    """A head in the manner of EAGLE-3 (engine/model/eagle.py). Its attention has the sizes of the model's."""

    taps: tuple[int, ...]
    """Layers of the model whose inputs it reads, in ascending order."""
    intermediate_size: int
    vocab_size: int
    """Tokens that it predicts; each is one of the model's."""
    norm_first: bool = False
    """The residual of its layer is the norm of the model's part, not the part itself."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """As ModelConfig has it."""
    own_embedding: bool = False
    """It has an embedding of its own for the model's tokens."""

    def problem(self, num_layers: int, vocab_size: int) -> str | None:
        """Why it cannot draft for a model with this many layers and tokens; None if it can."""
        if (
            not self.taps
            or list(self.taps) != sorted(set(self.taps))
            or not 0 <= self.taps[0] <= self.taps[-1] < num_layers
        ):
            return (
                f"it reads the inputs of layers {', '.join(map(str, self.taps))}, and the model has {num_layers} layers"
            )
        if not 1 <= self.vocab_size <= vocab_size:
            return f"draft_vocab_size is {self.vocab_size}, and the model has {vocab_size} tokens"
        if self.intermediate_size < 1:
            return f"intermediate_size is {self.intermediate_size}, must be positive"
        return None if self.rope_scaling is None else rope_problem(self.rope_scaling)

    def parameters(self, hidden: int, heads: int, kv_heads: int, head_size: int, vocab_size: int) -> int:
        """Of its matrices, for a model of these sizes."""
        attention = hidden * head_size * (2 * (heads + 2 * kv_heads) + heads)  # q, k and v read two rows
        own = vocab_size * hidden if self.own_embedding else 0
        mlp = 3 * hidden * self.intermediate_size
        return len(self.taps) * hidden**2 + attention + mlp + self.vocab_size * hidden + own
