"""One config-driven Llama decoder in eager torch.

T is the step's tokens of all requests, H the hidden size. Products are fused where inputs are shared: q, k and v in one
matrix, gate and up in one, so a layer is four matrix products.

    x += o( attention( rope(q), rope(k), v ) )      q, k, v = qkv( norm(x) )
    x += down( silu(gate) * up )                    gate, up = gate_up( norm(x) )

The order of casts follows transformers' Llama, so that bfloat16 rounds at the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.interface import AttentionBackend, RaggedBatch
from engine.model_config import ModelConfig
from engine.rope import angles, frequencies, rotate


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; matrices [out, in]."""

    attn_norm: Tensor  # [H]
    qkv: Tensor  # [(num_heads + 2 num_kv_heads) * head_size, H]
    qkv_bias: Tensor | None
    o: Tensor  # [H, num_heads * head_size]
    o_bias: Tensor | None
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2 * intermediate, H]
    down: Tensor  # [H, intermediate]


@dataclass(slots=True)
class Step:
    """What every layer of one step needs."""

    batch: RaggedBatch
    plan: Any  # the attention backend's
    cos: Tensor  # [T, 1, head_size / 2]
    sin: Tensor


class Model:
    """Weights on a device and the forward pass over a ragged batch."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], backend: AttentionBackend, device: str = "cpu"
    ) -> None:
        """`weights` under the names of engine/weights.py, all of one dtype. The dict is emptied while it is read, so
        that fusing never holds two copies of a model. Raises ValueError naming a missing or left-over weight."""
        self.config, self.backend, self.device = config, backend, torch.device(device)
        self.embed = self._take(weights, "embed")
        self.lm_head = self.embed if config.tie_word_embeddings else self._take(weights, "lm_head")
        self.norm = self._take(weights, "norm")
        self.layers = [self._layer(weights, f"layers.{i}.") for i in range(config.num_layers)]
        if weights:
            raise ValueError(f"weights the model has no place for: {', '.join(sorted(weights)[:5])}")
        self.frequency = frequencies(config, self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def _take(self, weights: dict[str, Tensor], *names: str) -> Tensor:
        """The named weights stacked along the output axis, on the device."""
        missing = [name for name in names if name not in weights]
        if missing:
            raise ValueError(f"the weights lack {', '.join(missing)}; the checkpoint does not match its configuration")
        parts = [weights.pop(name).to(self.device) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _layer(self, weights: dict[str, Tensor], at: str) -> Layer:
        biased = self.config.attention_bias
        return Layer(
            attn_norm=self._take(weights, at + "attn_norm"),
            qkv=self._take(weights, at + "q", at + "k", at + "v"),
            qkv_bias=self._take(weights, at + "q_bias", at + "k_bias", at + "v_bias") if biased else None,
            o=self._take(weights, at + "o"),
            o_bias=self._take(weights, at + "o_bias") if biased else None,
            mlp_norm=self._take(weights, at + "mlp_norm"),
            gate_up=self._take(weights, at + "gate", at + "up"),
            down=self._take(weights, at + "down"),
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        kv_pool: Tensor,
        rows: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute one step: its KV goes into the pool, logits [R, vocab_size] float32 of the asked rows come back.

        token_ids [T] int64; kv_pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_size];
        rows [R] int64, R may be 0. on_layer(l) is called, in order, once layer l's KV of this step is in the pool
        (on a GPU: once its write is queued on the current stream).
        """
        cos, sin = angles(batch.positions, self.frequency, self.dtype)
        step = Step(batch, self.backend.plan(batch), cos, sin)
        x = F.embedding(token_ids, self.embed)
        for index, layer in enumerate(self.layers):
            q = self._project(x, layer, kv_pool[:, index], step)
            if on_layer is not None:
                on_layer(index)
            x = x + self._attend(q, layer, kv_pool[:, index], step)
            x = x + self._mlp(x, layer)
        return F.linear(self._rms_norm(x[rows], self.norm), self.lm_head).float()

    def _project(self, x: Tensor, layer: Layer, kv: Tensor, step: Step) -> Tensor:
        """Rotated q [T, num_heads, head_size] of this layer; its k and v go into the pool."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = F.linear(self._rms_norm(x, layer.attn_norm), layer.qkv, layer.qkv_bias)
        qk, v = qkv.view(len(x), -1, self.config.head_size).split((heads + kv_heads, kv_heads), dim=1)
        qk = rotate(qk, step.cos, step.sin)
        self.backend.write_kv(qk[:, heads:], v, kv, step.batch, step.plan)
        return qk[:, :heads]

    def _attend(self, q: Tensor, layer: Layer, kv: Tensor, step: Step) -> Tensor:
        out = self.backend.attend(q, kv, step.batch, step.plan, self.config.head_size**-0.5)
        return F.linear(out.flatten(1), layer.o, layer.o_bias)

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        gate, up = F.linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps): normalised in float32, rounded, then weighted."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return weight * (wide * scale).to(x.dtype)
