"""One config-driven Llama decoder.

T is the step's tokens of all requests, H the hidden size. Products are fused where inputs are shared: q, k and v in one
matrix, gate and up in one, so a layer is four matrix products.

    x += o( attention( rope(q), rope(k), v ) )      q, k, v = qkv( norm(x) )
    x += down( silu(gate) * up )                    gate, up = gate_up( norm(x) )

An addition and the norm that follows it are one operation, so a layer ends with the next layer's norm.

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
from engine.ops import Ops, TorchOps
from engine.rope import angles, frequencies

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; the shapes of products are [out, in]."""

    attn_norm: Tensor  # [H]
    qkv: Linear  # [(num_heads + 2 num_kv_heads) * head_size, H]
    o: Linear  # [H, num_heads * head_size]
    mlp_norm: Tensor  # [H]
    gate_up: Linear  # [2 * intermediate, H]
    down: Linear  # [H, intermediate]


@dataclass(slots=True)
class Step:
    """What every layer of one step needs."""

    batch: RaggedBatch
    plan: Any  # the attention backend's
    cos: Tensor  # [T, head_size / 2] float32
    sin: Tensor


class Model:
    """Weights on a device and the forward pass over a ragged batch."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        backend: AttentionBackend,
        device: str = "cpu",
        ops: Ops | None = None,
    ) -> None:
        """`weights` under the names of engine/weights.py, all of one dtype. The dict is emptied while it is read, so
        that fusing never holds two copies of a model. Raises ValueError naming a missing or left-over weight."""
        self.config, self.backend, self.device = config, backend, torch.device(device)
        self.ops = ops or TorchOps()
        self.embed = self._take(weights, "embed")
        self.lm_head = self.ops.linear(self.embed if config.tie_word_embeddings else self._take(weights, "lm_head"))
        self.norm = self._take(weights, "norm")
        self.layers = [self._layer(weights, f"layers.{i}.") for i in range(config.num_layers)]
        self.next_norms = [*(layer.attn_norm for layer in self.layers[1:]), self.norm]
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
        def linear(*names: str) -> Linear:
            biases = [at + name + "_bias" for name in names]
            biased = self.config.attention_bias and biases[0] in weights
            return self.ops.linear(
                self._take(weights, *(at + name for name in names)), self._take(weights, *biases) if biased else None
            )

        return Layer(
            attn_norm=self._take(weights, at + "attn_norm"),
            qkv=linear("q", "k", "v"),
            o=linear("o"),
            mlp_norm=self._take(weights, at + "mlp_norm"),
            gate_up=linear("gate", "up"),
            down=linear("down"),
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
        cos, sin = angles(batch.positions, self.frequency)
        step = Step(batch, self.backend.plan(batch), cos, sin)
        eps, x = self.config.rms_norm_eps, F.embedding(token_ids, self.embed)
        normed = self.ops.rms_norm(x, self.layers[0].attn_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self.layers, self.next_norms, strict=True)):
            kv = kv_pool[:, index]
            q = self._project(normed, layer, kv, step)
            if on_layer is not None:
                on_layer(index)
            x, normed = self.ops.add_rms_norm(x, self._attend(q, layer, kv, step), layer.mlp_norm, eps)
            x, normed = self.ops.add_rms_norm(x, self._mlp(normed, layer), next_norm, eps)
        return self.lm_head(normed[rows]).float()

    def _project(self, x: Tensor, layer: Layer, kv: Tensor, step: Step) -> Tensor:
        """Rotated q [T, num_heads, head_size] of this layer; its k and v go into the pool."""
        qkv = layer.qkv(x).view(len(x), -1, self.config.head_size)
        heads = self.config.num_heads
        return self.backend.rotate_and_write_kv(qkv, heads, step.cos, step.sin, kv, step.batch, step.plan)

    def _attend(self, q: Tensor, layer: Layer, kv: Tensor, step: Step) -> Tensor:
        out = self.backend.attend(q, kv, step.batch, step.plan, self.config.head_size**-0.5)
        return layer.o(out.flatten(1))

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        return layer.down(self.ops.silu_mul(layer.gate_up(x)))
