"""The layers of a decoder, made from weights: which products each one has, and which weights each product fuses.

The names of weights are those of engine/checkpoint/weights.py. Every weight is taken once, so that memory never
contains two copies of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from attention.delta_states import rule_of
from attention.interface import AttentionBackend
from engine.model.delta import DeltaRule, NarrowGates
from engine.model.delta_config import Delta
from engine.model.draft_layer import DraftInput
from engine.model.experts.losses import Losses
from engine.model.experts.moe import Experts, GatedExpert
from engine.model.experts.routing import PlainRouter, RoutedRouter, Router
from engine.model.latent import LatentAttention, halves_of
from engine.model.latent_config import Latent
from engine.model.latent_prompts import LatentPrompts, measured
from engine.model.model_config import ModelConfig
from engine.model.ops.interface import Linear, Ops, Tail
from engine.model.ops.quantized import Weight, stacked, widened
from engine.model.parallel import Alone, Ranks


@dataclass(frozen=True, slots=True)
class Mlp:
    """Called with x [T, H]; returns [T, H]."""

    gate_up: Linear  # Ops.gated_linear of [2 * intermediate, H]
    down: Linear  # [H, intermediate]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; the shapes of products are [out, in]. None: the model has no such norm."""

    attn_norm: Tensor | None  # [H]
    qkv: Linear  # [(num_heads + 2 num_kv_heads) * head_size, H]; with gates, these come behind q; with a latent,
    # LatentAttention's first product, with a state, DeltaRule's
    q_norm: Tensor | None  # [head_size], of every head, or [num_heads * head_size], of all together
    k_norm: Tensor | None
    o: Linear  # [H, num_heads * head_size (or value_size)]
    attn_post_norm: Tensor | None  # [H]
    mlp_norm: Tensor | None  # [H]
    mlp: Mlp | Experts | Linear  # Linear: ExpertRanks.layer
    mlp_post_norm: Tensor | None  # [H]
    window: int  # tokens that a row sees, including itself; 0: all
    latent: LatentAttention | None = None
    sinks: Tensor | None = None  # [num_heads] float32
    delta: DeltaRule | None = None


class ExpertRanks(Protocol):
    """The experts of several ranks (engine/experts/group.py)."""

    def layer(self, index: int, router: Router, shared: Linear | None) -> Linear:
        """The experts of a layer: x [T, H] -> [T, H]."""

    def only(self, tokens: Tensor) -> None:
        """The layers that follow compute only these tokens of the step [n] int64."""

    def take_losses(self) -> Losses:
        """The tokens of the last step whose experts were lost."""


class Weights(Protocol):
    """Weights by name, taken one by one: a dict, or one that reads them from files only then."""

    def __contains__(self, name: object, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...

    def pop(self, name: str, /) -> Any: ...


class LayerMaker:
    """Takes the weights of a model and makes its layers."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: AttentionBackend,
        device: torch.device,
        ops: Ops,
        ranks: Ranks,
        experts: ExpertRanks | None,
    ) -> None:
        self.config, self.backend, self.device, self.ops = config, backend, device, ops
        self.ranks, self.experts, self._weights = ranks, experts, weights
        self._prompts: LatentPrompts | None = None  # made with the first layer that has a latent

    def _take(self, *names: str) -> Tensor:
        """The named weights stacked along the output axis, on the device."""
        return widened(self.matrix(*names))

    def matrix(self, *names: str) -> Weight:
        """As `_take`, and quantized weights remain so."""
        missing = [name for name in names if name not in self._weights]
        if missing:
            raise ValueError(f"the weights lack {', '.join(missing)}; the checkpoint does not match its configuration")
        parts = [self._weights.pop(name) for name in names]
        return stacked([part.to(self.device) for part in parts])

    def norm(self, name: str) -> Tensor:
        weight = self._take(name)
        return weight.float() + 1 if self.config.norm_plus_one else weight

    def layer(self, index: int) -> Layer:
        config, at = self.config, f"layers.{index}."

        def linear(*names: str, bias: bool = False) -> Linear:
            biases = self._take(*(at + name + "_bias" for name in names)) if bias else None
            return self.ops.linear(self.matrix(*(at + name for name in names)), biases)

        def norm(name: str) -> Tensor:
            return self.norm(at + name)

        first: tuple[str, ...] = ("q", "k", "v")
        if config.latent is not None:
            first = ("q_a" if config.latent.query_rank else "q", "kv_a")
        has_state = config.has_state(index)
        if config.delta is not None and has_state:
            first = ("q", "k", "v", "b", "f_a", "g_a") if config.delta.by_channel else ("qkvz", "ba")
        qk_norm = (config.qk_norm or config.joint_qk_norm) and not has_state
        enters = not config.no_input_norms
        return Layer(
            attn_norm=norm("attn_norm") if enters else None,
            qkv=linear(*first, bias=config.qkv_bias),
            q_norm=norm("q_norm") if qk_norm else None,
            k_norm=norm("k_norm") if qk_norm else None,
            o=linear("o", bias=config.o_bias),
            attn_post_norm=norm("attn_post_norm") if config.post_norms else None,
            mlp_norm=norm("mlp_norm") if enters else None,
            mlp=self._experts(at, index) if config.has_experts(index) else self._mlp(at),
            mlp_post_norm=norm("mlp_post_norm") if config.post_norms else None,
            window=config.window(index),
            latent=None if config.latent is None or has_state else self._latent(at, config.latent),
            sinks=self._take(at + "sinks").float() if config.sinks else None,
            delta=self._delta(at, index, config.delta) if config.delta is not None and has_state else None,
        )

    def draft_layer(self) -> tuple[DraftInput, Layer, Tail]:
        index = self.config.num_layers
        at, layer = f"layers.{index}.", self.layer(index)
        enorm, hnorm, head_norm = (self.norm(at + name) for name in ("enorm", "hnorm", "head_norm"))
        join = self.ops.linear(self.matrix(at + "eh"))
        assert layer.attn_norm is not None, "only DeepSeek's checkpoints have such a layer"
        enter = DraftInput(enorm, hnorm, join, layer.attn_norm, layer.qkv, self.ops, self.config.rms_norm_eps)
        return enter, layer, tail_of(layer, head_norm, None, self.config, self.ops, self.ranks)

    def _delta(self, at: str, index: int, sizes: Delta) -> DeltaRule:
        narrow = None
        if sizes.by_channel:
            decay, output = (self.ops.linear(self.matrix(at + name)) for name in ("f_b", "g_b"))
            narrow = NarrowGates(decay, output)
        convs = ("q_conv", "k_conv", "v_conv") if sizes.by_channel else ("conv",)
        return DeltaRule(
            sizes=sizes,
            number=sizes.layers.index(index),
            conv=self._take(*(at + name for name in convs)).squeeze(1),
            log_decay=self._take(at + "log_decay").float().flatten(),
            dt=self._take(at + "dt").float(),
            norm=self._take(at + "delta_norm"),
            eps=self.config.rms_norm_eps,
            ops=self.ops,
            rule=rule_of(self.backend),
            narrow=narrow,
        )

    def _latent(self, at: str, sizes: Latent) -> LatentAttention:
        halves = halves_of(self._take(at + "kv_b"), sizes, self.config.num_heads)
        to_latent, to_value = map(self.ops.per_head, halves)
        if self._prompts is None:
            self._prompts = LatentPrompts(sizes, self.config.num_heads, self.config.attention_scale, self.backend)
            if sizes.prompts == "auto" and self.device.type == "cpu":
                self._prompts.ratio = measured(self._prompts, to_latent, to_value, halves[0].dtype)
        return LatentAttention(
            sizes=sizes,
            num_heads=self.config.num_heads,
            q_norm=self._take(at + "q_a_norm") if sizes.query_rank else None,
            q_b=self.ops.linear(self.matrix(at + "q_b")) if sizes.query_rank else None,
            norm=self._take(at + "kv_a_norm"),
            to_latent=to_latent,
            to_value=to_value,
            ops=self.ops,
            prompts=self._prompts,
        )

    def _mlp(self, at: str) -> Mlp:
        return Mlp(
            gate_up=self.ops.gated_linear(self.matrix(at + "gate", at + "up"), self.config.activation),
            down=self.ops.linear(self.matrix(at + "down")),
        )

    def _experts(self, at: str, index: int) -> Experts | Linear:
        if self.experts is not None:
            return self.experts.layer(index, self._router(at), self._shared(at))
        each = [f"{at}experts.{expert}." for expert in range(self.config.num_experts)]
        biases = None
        if self.config.expert_biases:
            inner = [self._take(name + "gate_bias", name + "up_bias") for name in each]
            biases = torch.stack(inner), torch.stack([self._take(name + "down_bias") for name in each])
        return Experts(
            router=self._router(at),
            gate_up=self.ops.grouped_linear([self.matrix(name + "gate", name + "up") for name in each]),
            down=self.ops.grouped_linear([self.matrix(name + "down") for name in each]),
            gate=self._gate(),
            num_experts=self.config.num_experts,
            experts_per_token=self.config.experts_per_token,
            shared=self._shared(at),
            biases=biases,
        )

    def _shared(self, at: str) -> Linear | None:
        """The expert of all tokens."""
        if not self.config.shared_size:
            return None
        expert = self._mlp(at + "shared.")
        return GatedExpert(self._take(at + "shared_router"), expert) if self.config.shared_gate else expert

    def _gate(self) -> Callable[[Tensor], Tensor]:
        """Of gate and up of experts."""
        if self.config.activation == "clamped":
            return partial(self.ops.clamped_mul, limit=self.config.gate_limit)
        return {"silu": self.ops.silu_mul, "gelu_tanh": self.ops.gelu_tanh_mul}[self.config.activation]

    def _router(self, at: str) -> Router:
        weight, routing = self._take(at + "router"), self.config.routing
        chosen = self.config.experts_per_token, self.config.normalize_experts
        if routing is None:
            biases = self._take(at + "router_bias").to(weight.dtype) if self.config.expert_biases else None
            return PlainRouter(self.ops.linear(weight, biases), *chosen)
        bias = self._take(at + "router_bias") if routing.biased else None
        return RoutedRouter(weight.float(), bias, routing, *chosen)


def tail_of(
    layer: Layer, next_norm: Tensor | None, following: Linear | None, config: ModelConfig, ops: Ops, ranks: Ranks
) -> Tail:
    """The operations after attention in this layer, through the next layer's q, k and v."""
    eps, mlp, norms = config.rms_norm_eps, layer.mlp, (layer.mlp_norm, next_norm)
    plain = isinstance(ranks, Alone) and not config.post_norms and not config.branch_scale
    if isinstance(mlp, Mlp) and plain and norms[0] is not None and norms[1] is not None:
        return ops.tail(layer.o, norms[0], mlp.gate_up, mlp.down, norms[1], eps, following)

    def added(weight: Tensor | None, delta: Tensor) -> Tensor:
        delta = delta if weight is None else ops.rms_norm(delta, weight, eps)
        return delta * config.branch_scale if config.branch_scale else delta

    def entered(x: Tensor, delta: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the sum, the input of the next product)"""
        if weight is None:
            x = x + delta
            return x, x
        return ops.add_rms_norm(x, delta, weight, eps)

    def tail(attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        delta = added(layer.attn_post_norm, ranks.sum(layer.o(attended)))
        x, normed = entered(x, delta, norms[0])
        delta = added(layer.mlp_post_norm, ranks.sum(mlp(normed)))
        x, normed = entered(x, delta, norms[1])
        return x, normed if following is None else following(normed)

    return tail
