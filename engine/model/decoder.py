"""One config-driven decoder for the Llama, Mistral, Qwen, Gemma, DeepSeek and gpt-oss families.

T is the step's tokens of all requests, H the hidden size. Products are fused where inputs are shared: q, k and v in one
matrix, gate and up in one, so a dense layer is four matrix products.

    x += o( attention( rope(q), rope(k), v ) )      q, k, v = qkv( norm(x) )
    x += down( act(gate) * up )                     gate, up = gate_up( norm(x) )

An addition and the following norm are one operation, so a layer ends with the next layer's norm. ModelConfig names the
optional parts of some families: biases, norms of q and k, windows, soft caps and sinks, norms before the additions,
experts instead of the MLP (experts/moe.py), a latent instead of K and V (latent.py), in some layers a state instead of
attention (delta.py), a layer that drafts (draft_layer.py, eagle.py). Under tensor parallelism, every
rank has some heads and some columns of each MLP; the two results that are added to x are summed over the ranks
(parallel.py).

The order of casts follows transformers, so that bfloat16 rounds at the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from attention.delta_states import rule_of
from attention.interface import AttentionBackend, RaggedBatch
from attention.states import StateBatch, memory_of
from cache.layer_groups import LayerGroups
from engine.model.delta import DeltaRule, NarrowGates
from engine.model.delta_config import Delta
from engine.model.draft_layer import DraftInput
from engine.model.experts.losses import Losses
from engine.model.experts.moe import Experts, GatedExpert
from engine.model.experts.routing import PlainRouter, RoutedRouter, Router
from engine.model.latent import LatentAttention, halves_of
from engine.model.latent_config import Latent
from engine.model.layers_cpu import all_in_one
from engine.model.model_config import ModelConfig
from engine.model.ops import Linear, Ops, Tail, TorchOps, Vocabulary
from engine.model.parallel import Alone, Ranks
from engine.model.quantized import Weight, stacked, widened
from engine.model.rope import Rope
from sched.offload import Plan

SCORED_AT_ONCE = 64
"""Rows of logits per part: 12 MiB at a vocabulary of 49,152 tokens."""


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

    attn_norm: Tensor  # [H]
    qkv: Linear  # [(num_heads + 2 num_kv_heads) * head_size, H]; with gates, these come behind q; with a latent,
    # LatentAttention's first product, with a state, DeltaRule's
    q_norm: Tensor | None  # [head_size], of every head
    k_norm: Tensor | None
    o: Linear  # [H, num_heads * head_size (or value_size)]
    attn_post_norm: Tensor | None  # [H]
    mlp_norm: Tensor  # [H]
    mlp: Mlp | Experts | Linear  # Linear: ExpertRanks.layer
    mlp_post_norm: Tensor | None  # [H]
    window: int  # tokens that a row sees, including itself; 0: all
    latent: LatentAttention | None = None
    sinks: Tensor | None = None  # [num_heads] float32
    delta: DeltaRule | None = None


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """The layer that drafts: the model's own (draft_layer.py), or of a head (eagle.py)."""

    enter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(embeddings [T, H] of the next tokens, hidden [T, H]) -> (x [T, H], layer.qkv's output)."""
    layer: Layer
    leave: Tail  # ends with a norm
    rope: Rope
    taps: tuple[int, ...] = ()
    """Its hidden [T, H] follows from the inputs of these layers of the model; empty: it is the output of the last norm.
    """
    fuse: Linear | None = None  # of the inputs of `taps`, [H, len(taps) * H]
    embedding: Vocabulary | None = None  # None: the model's
    logits: Callable[[Tensor], Tensor] | None = None
    """Of x behind the layer, which is then its output; None: the model's, and the output is the norm of x."""


@dataclass(slots=True)
class Step:
    """The inputs that all layers of one step share."""

    batch: RaggedBatch
    plan: Any  # the attention backend's
    angles: tuple[Tensor, Tensor]  # cos, sin [T, head_size / 2] float32
    local_angles: tuple[Tensor, Tensor]  # of layers with a window


Attend = Callable[[Tensor, Tensor, float, float], Tensor]
"""Attention in place of the backend's: (q [T, num_heads, head_size], the layer's part of the pool, scale, soft cap) ->
as q. Called once for each layer, in order."""


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


class Offload(Protocol):
    """Keeps the weights of some layers on disk (engine/offload/streamed.py)."""

    def layers(self, make: Callable[[int], Layer], count: int) -> list[Layer]:
        """`count` layers, made in order; the weights of each leave memory before the one after the next is made."""

    def tail(self, index: int, tail: Tail) -> Tail:
        """The same operations, after a wait for the weights that they read: those of layer `index` behind attention,
        and the first product of the layer after it."""

    @property
    def plan(self) -> Plan:
        """Which layers they are."""

    def least_s(self) -> float:
        """Seconds that a pass takes at least, by the reads so far."""

    def state(self) -> dict[str, Any]:
        """For /debug/state."""

    def close(self) -> None:
        """No step runs, now or later."""


class Scores(Protocol):
    """Takes the logits of prompt positions, in addition to the logits for sampling."""

    rows: Tensor  # [S] int64

    def take(self, first: int, logits: Tensor) -> None:
        """Logits [C, vocab_size] float32 of rows[first : first + C], C at most SCORED_AT_ONCE."""
        ...


@dataclass(frozen=True, slots=True)
class Processes:
    """Other processes that compute a part of the model. With `ranks`, this one has the config and the weights of one
    shard (engine/model/parallel.py); with `experts`, its weights have no experts."""

    ranks: Ranks | None = None
    experts: ExpertRanks | None = None


class Model:
    """Weights on a device and the forward pass over a ragged batch."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: AttentionBackend,
        device: str = "cpu",
        ops: Ops | None = None,
        groups: LayerGroups | None = None,
        processes: Processes | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`weights` under the names of engine/checkpoint/weights.py, all of one dtype. Matrices may be
        Quantized or Scaled, for products in that dtype. This empties the dict while it fuses weights, so that
        memory never contains two copies of a model. Raises ValueError naming a missing or left-over weight.

        `groups`: how the KV pool has the layers; None = all in each block. `processes`: others that compute a part.
        `offload`: where layers are that do not stay in memory; only for whole passes on one rank."""
        if config.delta is not None and (groups is None or not groups.num_states):
            raise ValueError("a model whose layers keep a state needs groups for its states")
        self.groups = groups
        self.config, self.backend, self.device = config, backend, torch.device(device)
        self.ops: Ops = ops or TorchOps()
        processes = processes or Processes()
        self.ranks: Ranks = processes.ranks or Alone()
        self.alone = isinstance(self.ranks, Alone)
        self.experts = processes.experts
        embedding = self._matrix(weights, "embed")
        self.dtype = embedding.dtype
        # Rounded to the dtype, because the model was trained with the rounded value.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self.embedding = self.ops.vocabulary(embedding)
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else self.ops.vocabulary(self._matrix(weights, "lm_head"))
        self.norm = self._norm(weights, "norm")
        self.offload, make = offload, partial(self._layer, weights)
        count = config.num_layers
        self.layers = list(map(make, range(count))) if offload is None else offload.layers(make, count)
        nexts = [*((layer.attn_norm, layer.qkv) for layer in self.layers[1:]), (self.norm, None)]
        self.tails = [self._tail(layer, *after) for layer, after in zip(self.layers, nexts, strict=True)]
        if offload is not None:
            self.tails = [offload.tail(index, tail) for index, tail in enumerate(self.tails)]
        self._borders: dict[int, Tail] = {}  # of layers that end a part, made when they first do
        own = self._draft_layer(weights) if config.draft_layers else None
        self.layers_at_once = all_in_one(config, backend, self.ops, self.tails) if groups is None else None
        if weights:
            raise ValueError(f"the model has no place for these weights: {', '.join(sorted(weights)[:5])}")
        unrotated = config.head_size - config.rope_size if config.latent is None else 0
        self.rope = Rope(config.rope_size, config.rope_theta, config.rope_scaling, self.device, unrotated)
        self.local_rope = self.rope
        if config.local_rope_theta:
            self.local_rope = Rope(config.head_size, config.local_rope_theta, None, self.device)
        self.draft: DraftLayer | None = None  # of a head: eagle.py
        if own is not None:
            self.draft = DraftLayer(*own, self.rope)

    def close(self) -> None:
        """Give the memory of the layers back at once: a tail may refer to its model. No step may run, now or later."""
        self.layers, self.tails, self.layers_at_once, self._borders, self.draft = [], [], None, {}, None
        if self.offload is not None:
            self.offload.close()

    # --- weights

    def _take(self, weights: Weights, *names: str) -> Tensor:
        """The named weights stacked along the output axis, on the device."""
        return widened(self._matrix(weights, *names))

    def _matrix(self, weights: Weights, *names: str) -> Weight:
        """As _take, and quantized weights remain so."""
        missing = [name for name in names if name not in weights]
        if missing:
            raise ValueError(f"the weights lack {', '.join(missing)}; the checkpoint does not match its configuration")
        parts = [weights.pop(name) for name in names]
        return stacked([part.to(self.device) for part in parts])

    def _norm(self, weights: Weights, name: str) -> Tensor:
        weight = self._take(weights, name)
        return weight.float() + 1 if self.config.norm_plus_one else weight

    def _layer(self, weights: Weights, index: int) -> Layer:
        config, at = self.config, f"layers.{index}."

        def linear(*names: str, bias: bool = False) -> Linear:
            biases = self._take(weights, *(at + name + "_bias" for name in names)) if bias else None
            return self.ops.linear(self._matrix(weights, *(at + name for name in names)), biases)

        def norm(name: str) -> Tensor:
            return self._norm(weights, at + name)

        first: tuple[str, ...] = ("q", "k", "v")
        if config.latent is not None:
            first = ("q_a" if config.latent.query_rank else "q", "kv_a")
        has_state = config.has_state(index)
        if config.delta is not None and has_state:
            first = ("q", "k", "v", "b", "f_a", "g_a") if config.delta.by_channel else ("qkvz", "ba")
        qk_norm = config.qk_norm and not has_state
        return Layer(
            attn_norm=norm("attn_norm"),
            qkv=linear(*first, bias=config.qkv_bias),
            q_norm=norm("q_norm") if qk_norm else None,
            k_norm=norm("k_norm") if qk_norm else None,
            o=linear("o", bias=config.o_bias),
            attn_post_norm=norm("attn_post_norm") if config.post_norms else None,
            mlp_norm=norm("mlp_norm"),
            mlp=self._experts(weights, at, index) if config.has_experts(index) else self._mlp(weights, at),
            mlp_post_norm=norm("mlp_post_norm") if config.post_norms else None,
            window=config.window(index),
            latent=None if config.latent is None or has_state else self._latent(weights, at, config.latent),
            sinks=self._take(weights, at + "sinks").float() if config.sinks else None,
            delta=self._delta(weights, at, index, config.delta) if config.delta is not None and has_state else None,
        )

    def _draft_layer(self, weights: Weights) -> tuple[DraftInput, Layer, Tail]:
        index = self.config.num_layers
        at, layer = f"layers.{index}.", self._layer(weights, index)
        enorm, hnorm, head_norm = (self._norm(weights, at + name) for name in ("enorm", "hnorm", "head_norm"))
        join = self.ops.linear(self._matrix(weights, at + "eh"))
        enter = DraftInput(enorm, hnorm, join, layer.attn_norm, layer.qkv, self.ops, self.config.rms_norm_eps)
        return enter, layer, self._tail(layer, head_norm, None)

    def _delta(self, weights: Weights, at: str, index: int, sizes: Delta) -> DeltaRule:
        narrow = None
        if sizes.by_channel:
            decay, output = (self.ops.linear(self._matrix(weights, at + name)) for name in ("f_b", "g_b"))
            narrow = NarrowGates(decay, output)
        convs = ("q_conv", "k_conv", "v_conv") if sizes.by_channel else ("conv",)
        return DeltaRule(
            sizes=sizes,
            number=sizes.layers.index(index),
            conv=self._take(weights, *(at + name for name in convs)).squeeze(1),
            log_decay=self._take(weights, at + "log_decay").float().flatten(),
            dt=self._take(weights, at + "dt").float(),
            norm=self._take(weights, at + "delta_norm"),
            eps=self.config.rms_norm_eps,
            ops=self.ops,
            rule=rule_of(self.backend),
            narrow=narrow,
        )

    def _latent(self, weights: Weights, at: str, sizes: Latent) -> LatentAttention:
        to_latent, to_value = halves_of(self._take(weights, at + "kv_b"), sizes, self.config.num_heads)
        return LatentAttention(
            sizes=sizes,
            num_heads=self.config.num_heads,
            scale=self.config.attention_scale,
            q_norm=self._take(weights, at + "q_a_norm") if sizes.query_rank else None,
            q_b=self.ops.linear(self._matrix(weights, at + "q_b")) if sizes.query_rank else None,
            norm=self._take(weights, at + "kv_a_norm"),
            to_latent=self.ops.per_head(to_latent),
            to_value=self.ops.per_head(to_value),
            ops=self.ops,
            backend=self.backend,
        )

    def _mlp(self, weights: Weights, at: str) -> Mlp:
        return Mlp(
            gate_up=self.ops.gated_linear(self._matrix(weights, at + "gate", at + "up"), self.config.activation),
            down=self.ops.linear(self._matrix(weights, at + "down")),
        )

    def _experts(self, weights: Weights, at: str, index: int) -> Experts | Linear:
        if self.experts is not None:
            return self.experts.layer(index, self._router(weights, at), self._shared(weights, at))
        each = [f"{at}experts.{expert}." for expert in range(self.config.num_experts)]
        biases = None
        if self.config.expert_biases:
            inner = [self._take(weights, name + "gate_bias", name + "up_bias") for name in each]
            biases = torch.stack(inner), torch.stack([self._take(weights, name + "down_bias") for name in each])
        return Experts(
            router=self._router(weights, at),
            gate_up=self.ops.grouped_linear([self._matrix(weights, name + "gate", name + "up") for name in each]),
            down=self.ops.grouped_linear([self._matrix(weights, name + "down") for name in each]),
            gate=self._gate(),
            num_experts=self.config.num_experts,
            experts_per_token=self.config.experts_per_token,
            shared=self._shared(weights, at),
            biases=biases,
        )

    def _shared(self, weights: Weights, at: str) -> Linear | None:
        """The expert of all tokens."""
        if not self.config.shared_size:
            return None
        expert = self._mlp(weights, at + "shared.")
        return GatedExpert(self._take(weights, at + "shared_router"), expert) if self.config.shared_gate else expert

    def _gate(self) -> Callable[[Tensor], Tensor]:
        """Of gate and up of experts."""
        if self.config.activation == "clamped":
            return partial(self.ops.clamped_mul, limit=self.config.gate_limit)
        return {"silu": self.ops.silu_mul, "gelu_tanh": self.ops.gelu_tanh_mul}[self.config.activation]

    def _router(self, weights: Weights, at: str) -> Router:
        weight, routing = self._take(weights, at + "router"), self.config.routing
        chosen = self.config.experts_per_token, self.config.normalize_experts
        if routing is None:
            biases = self._take(weights, at + "router_bias").to(self.dtype) if self.config.expert_biases else None
            return PlainRouter(self.ops.linear(weight, biases), *chosen)
        bias = self._take(weights, at + "router_bias") if routing.biased else None
        return RoutedRouter(weight.float(), bias, routing, *chosen)

    def _tail(self, layer: Layer, next_norm: Tensor, following: Linear | None) -> Tail:
        """The operations after attention in this layer, through the next layer's q, k and v."""
        ops, eps, mlp = self.ops, self.config.rms_norm_eps, layer.mlp
        if isinstance(mlp, Mlp) and self.alone and not self.config.post_norms:
            return ops.tail(layer.o, layer.mlp_norm, mlp.gate_up, mlp.down, next_norm, eps, following)

        def tail(attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            delta = self._post_norm(self.ranks.sum(layer.o(attended)), layer.attn_post_norm)
            x, normed = ops.add_rms_norm(x, delta, layer.mlp_norm, eps)
            delta = self._post_norm(self.ranks.sum(mlp(normed)), layer.mlp_post_norm)
            x, normed = ops.add_rms_norm(x, delta, next_norm, eps)
            return x, normed if following is None else following(normed)

        return tail

    # --- forward

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: RaggedBatch,
        kv_pool: Tensor,
        rows: Tensor,
        on_layer: Callable[[int], None] | None = None,
        before_layer: Callable[[int], None] | None = None,
        scores: Scores | None = None,
        others: Sequence[RaggedBatch] = (),
        states: StateBatch | None = None,
        on_hidden: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Compute one step: writes its KV to the pool; returns logits [R, vocab_size] float32 of `rows`.

        token_ids [T] int64; kv_pool [num_blocks, *BlockGeometry.shape] (cache/block.py);
        rows [R] int64, R may be 0. on_layer(l) is called, in order, when layer l's KV of this step is in the pool, on
        every rank (on a GPU: when its write is queued on the current stream). before_layer(l) is called before layer l
        reads the pool, and may wait for KV that is still loading; the other ranks do not wait. `scores` gets the logits
        of its rows part by part, so that memory never contains all logits of a long prompt. `others`: the batch in the
        blocks of each further group of layers with KV of tokens; `states`: where the requests keep their states.
        `on_hidden` gets what `forward_draft` needs of these tokens, [T, H].
        """
        wanted = rows if scores is None else torch.cat((rows, scores.rows))
        tapped: dict[int, Tensor] = {}
        if on_hidden is not None and self.draft is not None:
            tapped = dict.fromkeys(self.draft.taps, token_ids)
        every = on_hidden is not None and not tapped  # rows are needed behind the last layer
        left = slice(None) if every else wanted
        step, x = self._step(batch), self.embed(token_ids)
        more = (Step(other, self.backend.plan(other), step.angles, step.local_angles) for other in others)
        steps = [step, *more]
        first = self.layers[0]
        projected = first.qkv(self.ops.rms_norm(x, first.attn_norm, self.config.rms_norm_eps))
        if self.layers_at_once is not None and on_layer is None and before_layer is None and not tapped:
            layers = self.layers_at_once
            attended = layers.run(projected, x, kv_pool, step.plan, step.angles, step.local_angles)
            x, projected = self.tails[-1](attended[left], x[left])
        else:
            x, projected = self._layer_by_layer(
                x, projected, kv_pool, left, steps, states, on_layer, before_layer, tapped
            )
        if on_hidden is not None:
            on_hidden(self._fused(tapped) if tapped else projected)
        normed = projected[wanted] if every or not self.alone else projected  # by the norm before the head
        if scores is not None:
            for begin in range(0, len(scores.rows), SCORED_AT_ONCE):
                part = normed[len(rows) + begin :][:SCORED_AT_ONCE]
                scores.take(begin, self.logits(part))
        return self.logits(normed[: len(rows)])

    @torch.inference_mode()
    def forward_draft(self, token_ids: Tensor, hidden: Tensor, batch: RaggedBatch, kv_pool: Tensor) -> Tensor:
        """Compute the layer that drafts: writes its KV to the pool; returns its output [T, H], whose `draft_logits`
        predict the token after each of token_ids.

        token_ids [T] int64: the token behind each token of the batch; hidden [T, H]: of the batch, what `forward` gave
        to `on_hidden`, or this returned for the positions before. Only on one rank, for a model with such a layer."""
        draft = self.draft
        assert draft is not None
        angles = draft.rope.angles(batch.positions)
        step = Step(batch, self.backend.plan(batch), angles, angles)
        embedding = self.embed(token_ids) if draft.embedding is None else draft.embedding.embed(token_ids)
        x, projected = draft.enter(embedding, hidden)
        x, normed = draft.leave(self._attention(projected, draft.layer, kv_pool[:, -1], step), x)
        return normed if draft.logits is None else x

    @torch.inference_mode()
    def draft_logits(self, output: Tensor) -> Tensor:
        """[R, vocab_size] float32 from outputs [R, H] of `forward_draft`."""
        assert self.draft is not None
        return self.logits(output) if self.draft.logits is None else self.draft.logits(output)

    def _fused(self, tapped: dict[int, Tensor]) -> Tensor:
        assert self.draft is not None and self.draft.fuse is not None
        return self.draft.fuse(torch.cat([tapped[layer] for layer in self.draft.taps], 1))

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> the input of the first layer, [T, H]."""
        x = self.embedding.embed(token_ids)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    @torch.inference_mode()
    def forward_part(
        self,
        layers: range,
        hidden: Tensor,
        batch: RaggedBatch,
        kv_pool: Tensor,
        rows: Tensor,
        on_layer: Callable[[int], None] | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """Compute some of the layers, as one stage of a pipeline: their input `hidden` [T, H], overwritten, -> the
        input of the layer after them [T, H]; behind the last layer, the logits [R, vocab_size] float32 of `rows`.

        `attend`: instead of the backend's attention, for keys that lie partly outside the pool; only for layers
        without a latent, a window and sinks.

        The other arguments are those of `forward`. The values between two stages are those between the same two layers
        of `forward`, so a pipeline computes what one node computes. Only on one rank, and without `offload`."""
        assert self.offload is None, "config/contradictions.py and Runner.why_whole keep such passes away"
        step, x, last = self._step(batch), hidden, len(self.layers) - 1
        first = self.layers[layers[0]]
        projected = first.qkv(self.ops.rms_norm(x, first.attn_norm, self.config.rms_norm_eps))
        for index in layers:
            attended = self._attention(projected, self.layers[index], kv_pool[:, index], step, attend)
            if on_layer is not None:
                on_layer(index)
            if index == last:
                attended, x = attended[rows], x[rows]
            inner = index == last or index != layers[-1]
            x, projected = (self.tails[index] if inner else self._border(index))(attended, x)
        return self.logits(projected) if layers[-1] == last else x

    def _border(self, index: int) -> Tail:
        """The layer's operations after attention, without the next layer's product, which another node computes."""
        if index not in self._borders:
            self._borders[index] = self._tail(self.layers[index], self.layers[index + 1].attn_norm, None)
        return self._borders[index]

    def _step(self, batch: RaggedBatch) -> Step:
        angles = self.rope.angles(batch.positions)
        local = angles if self.local_rope is self.rope else self.local_rope.angles(batch.positions)
        return Step(batch, self.backend.plan(batch), angles, local)

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """[R, vocab_size] float32 from the output [R, H] of the last norm."""
        logits = self.ranks.gather(self.head.logits(normed))[:, : self.config.vocab_size]
        return soft_cap(logits, self.config.logit_soft_cap)

    def _layer_by_layer(
        self,
        x: Tensor,
        projected: Tensor,
        kv_pool: Tensor,
        left: Tensor | slice,
        steps: Sequence[Step],
        states: StateBatch | None,
        on_layer: Callable[[int], None] | None,
        before_layer: Callable[[int], None] | None,
        tapped: dict[int, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """x [T, H] and the first layer's `projected` -> both after the last layer; on one rank only rows `left`.
        steps: one for each group of layers with KV of tokens. tapped: gets the inputs [T, H] of its layers."""
        pools = kv_pool.unbind(1)  # a view for each layer, in one call
        memory = None if states is None else memory_of(kv_pool)
        for index, (layer, tail) in enumerate(zip(self.layers, self.tails, strict=True)):
            group, place = (0, index) if self.groups is None else self.groups.places[index]
            if index in tapped:
                tapped[index] = x.clone()  # tails reuse its memory
            if before_layer is not None:
                before_layer(index)
            if layer.delta is not None and memory is not None and states is not None:
                attended = layer.delta(projected, memory, kv_pool.dtype, states)
            else:
                attended = self._attention(projected, layer, pools[place], steps[group])
            if on_layer is not None and self.alone:
                on_layer(index)
            if self.alone and layer is self.layers[-1]:
                attended, x = attended[left], x[left]  # the other rows are not needed
                if self.experts is not None and not isinstance(left, slice):
                    self.experts.only(left)
            x, projected = tail(attended, x)
            if on_layer is not None and not self.alone:
                on_layer(index)  # after the sums over the ranks, all ranks have written
        return x, projected

    def _attention(self, qkv: Tensor, layer: Layer, kv: Tensor, step: Step, attend: Attend | None = None) -> Tensor:
        """layer.qkv's output -> layer.o's input; writes this step's KV to the pool."""
        if layer.latent is not None:
            return layer.latent(qkv, kv, step.batch, step.plan, step.angles)
        config, heads = self.config, self.config.num_heads
        qkv = qkv.view(len(qkv), -1, config.head_size)
        gate = None
        if config.gated:
            gate, qkv = qkv[:, heads : 2 * heads], torch.cat((qkv[:, :heads], qkv[:, 2 * heads :]), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, _ = qkv.split((heads, config.num_kv_heads, config.num_kv_heads), dim=1)
            q.copy_(self.ops.rms_norm(q, layer.q_norm, config.rms_norm_eps))
            k.copy_(self.ops.rms_norm(k, layer.k_norm, config.rms_norm_eps))
        cos, sin = step.local_angles if layer.window else step.angles
        q = self.backend.rotate_and_write_kv(qkv, heads, cos, sin, kv, step.batch, step.plan)
        if attend is not None:
            return attend(q, kv, config.attention_scale, config.attention_soft_cap).flatten(1)
        options: dict[str, Any] = {} if layer.sinks is None else {"sinks": layer.sinks}
        out = self.backend.attend(
            q,
            kv,
            step.batch,
            step.plan,
            config.attention_scale,
            window=layer.window,
            soft_cap=config.attention_soft_cap,
            **options,
        )
        return (out if gate is None else out * gate.sigmoid()).flatten(1)

    def _post_norm(self, delta: Tensor, weight: Tensor | None) -> Tensor:
        return delta if weight is None else self.ops.rms_norm(delta, weight, self.config.rms_norm_eps)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): about x if x is small, never above the cap; cap 0.0 leaves x unchanged."""
    return cap * (x / cap).tanh() if cap else x
