"""A head that drafts from inner layers of the model: EAGLE-3 (arXiv 2503.01840).

The head has one decoder layer with KV of its own, which lies in the pool as that of a further layer of the model. The
inputs a, b, c [H] of three of the model's layers at position i become one row, and the next token is known:

    f = fc [a | b | c]                          e = attn_norm(embed(t_(i+1)))        g = hidden_norm(f)
    q, k, v = qkv [e | g]                       x = f + o(attention)                 with norm_first: x = g + ...
    x = x + mlp(mlp_norm(x))                    logits = head(norm(x))

For a further token, the head reads its own x in place of f. head has a row for each of some of the model's tokens:
row r is token r + d2t[r]. What it does not know is never drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.decoder import DraftLayer
from engine.model.eagle_config import Eagle
from engine.model.layers import Layer, Mlp
from engine.model.model_config import ModelConfig
from engine.model.ops.interface import Linear, Ops, Vocabulary
from engine.model.rope import Rope


@dataclass(frozen=True, slots=True)
class EagleInput:
    """See DraftLayer.enter."""

    attn_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    qkv: Linear  # [(num_heads + 2 num_kv_heads) * head_size, 2 H]
    ops: Ops
    eps: float
    norm_first: bool

    def __call__(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.ops.rms_norm(hidden, self.hidden_norm, self.eps)
        projected = self.qkv(torch.cat((self.ops.rms_norm(embedded, self.attn_norm, self.eps), normed), 1))
        # The layer may reuse the memory of x, and the caller keeps `hidden`.
        return normed if self.norm_first else hidden.clone(), projected


@dataclass(frozen=True, slots=True)
class EagleLogits:
    """x [R, H] -> logits [R, vocab_size] float32 of the model's tokens; -inf for those that the head does not know."""

    norm: Tensor  # [H]
    head: Vocabulary
    tokens: Tensor  # [draft tokens] int64: the model's token of each row of the head
    vocab_size: int
    ops: Ops
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        known = self.head.logits(self.ops.rms_norm(x, self.norm, self.eps))
        logits = known.new_full((len(x), self.vocab_size), -torch.inf)
        logits[:, self.tokens] = known
        return logits


def eagle_layer(
    sizes: Eagle, weights: Mapping[str, Tensor], config: ModelConfig, ops: Ops, device: torch.device
) -> DraftLayer:
    """weights: by the names of engine/checkpoint/eagle_head.py, on the device; config: of the model."""
    eps = sizes.rms_norm_eps
    qkv = ops.linear(torch.cat([weights[name] for name in ("q", "k", "v")]))
    mlp = Mlp(
        gate_up=ops.gated_linear(torch.cat((weights["gate"], weights["up"])), "silu"), down=ops.linear(weights["down"])
    )
    layer = Layer(
        attn_norm=weights["attn_norm"],
        qkv=qkv,
        q_norm=None,
        k_norm=None,
        o=ops.linear(weights["o"]),
        attn_post_norm=None,
        mlp_norm=weights["mlp_norm"],
        mlp=mlp,
        mlp_post_norm=None,
        window=0,
    )
    rows = torch.arange(sizes.vocab_size, device=device)
    tokens = rows + weights["d2t"] if "d2t" in weights else rows
    return DraftLayer(
        enter=EagleInput(weights["attn_norm"], weights["hidden_norm"], qkv, ops, eps, sizes.norm_first),
        layer=layer,
        leave=ops.tail(layer.o, weights["mlp_norm"], mlp.gate_up, mlp.down, weights["norm"], eps, None),
        rope=Rope(config.rope_size, sizes.rope_theta, sizes.rope_scaling, device),
        taps=sizes.taps,
        fuse=ops.linear(weights["fc"]),
        embedding=ops.vocabulary(weights["embed"]) if sizes.own_embedding else None,
        logits=EagleLogits(weights["norm"], ops.vocabulary(weights["head"]), tokens, config.vocab_size, ops, eps),
    )
