"""The part of a ModelConfig about latent attention. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (engine/model/latent.py). Sizes in elements."""

    rank: int
    """Of the latent from which keys and values of all heads follow."""
    rope_size: int
    """Of the rotary part of a key, which all heads share, and of a query."""
    nope_size: int
    """Of the rest of a head's query and key."""
    value_size: int
    """Of a head's value."""
    query_rank: int = 0
    """Queries follow from a latent of this size; 0: from the hidden state."""
    rotated: bool = True
    """False: keys and queries have no positions (Kimi Linear)."""
    interleaved: bool = True
    """Rotary pairs are neighbours; otherwise they are half a size apart."""
    sharpness: float = 1.0
    """Factor of the scores (YaRN)."""
    prompts: str = "auto"
    """The form of chunks (engine/model/latent_prompts.py): absorbed, heads, or auto for the faster one of each chunk.
    From --latent-prompts, not from a checkpoint."""

    @property
    def row_size(self) -> int:
        """What a layer keeps of a token: the latent and the rotary part."""
        return self.rank + self.rope_size

    @property
    def query_size(self) -> int:
        """Of a head's query."""
        return self.nope_size + self.rope_size

    def problem(self) -> str | None:
        """Why these sizes are impossible; None if they are not."""
        for key, size in (
            ("kv_lora_rank", self.rank),
            ("qk_rope_head_dim", self.rope_size),
            ("qk_nope_head_dim", self.nope_size),
            ("v_head_dim", self.value_size),
        ):
            if size < 1:
                return f"{key} is {size}, must be positive"
        if self.query_rank < 0:
            return f"q_lora_rank is {self.query_rank}, must be positive or null"
        return None
