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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from attention.interface import AttentionBackend, RaggedBatch
from attention.states import StateBatch, memory_of
from cache.layer_groups import LayerGroups
from engine.model.layers import ExpertRanks, Layer, LayerMaker, Weights, tail_of
from engine.model.layers_cpu import Stop, all_in_one
from engine.model.model_config import ModelConfig
from engine.model.ops.interface import Linear, Ops, Tail, TorchOps, Vocabulary
from engine.model.parallel import Alone, Ranks
from engine.model.rope import Rope
from sched.offload import Plan

SCORED_AT_ONCE = 64
"""Rows of logits per part: 12 MiB at a vocabulary of 49,152 tokens."""


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


@dataclass(frozen=True, slots=True)
class Between:
    """The tokens of a pass that has ended before `layer`, or in it behind attention."""

    layer: int
    x: Tensor  # [T, H], the layer's input
    inner: Tensor  # the output of its first product, or of its attention
    attended: bool

    def copy(self) -> Between:
        """Layers overwrite their input."""
        return Between(self.layer, self.x.clone(), self.inner.clone(), self.attended)


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
class Outside:
    """The parts of a model outside the memory of this process. With `ranks`, other processes have other shards, and
    this one has the config and the weights of one (engine/model/parallel.py); with `experts`, its weights have no
    experts; with `offload`, layers are on disk, which is only for whole passes on one rank."""

    ranks: Ranks | None = None
    experts: ExpertRanks | None = None
    offload: Offload | None = None


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
        outside: Outside | None = None,
    ) -> None:
        """`weights` under the names of engine/checkpoint/weights.py, all of one dtype. Matrices may be
        Quantized or Scaled, for products in that dtype. This empties the dict while it fuses weights, so that
        memory never contains two copies of a model. Raises ValueError naming a missing or left-over weight.

        `groups`: how the KV pool has the layers; None = all in each block."""
        if config.delta is not None and (groups is None or not groups.num_states):
            raise ValueError("a model whose layers keep a state needs groups for its states")
        self.groups = groups
        self.config, self.backend, self.device = config, backend, torch.device(device)
        self.ops: Ops = ops or TorchOps()
        outside = outside or Outside()
        offload = outside.offload
        self.ranks: Ranks = outside.ranks or Alone()
        self.alone = isinstance(self.ranks, Alone)
        self.experts = outside.experts
        make = LayerMaker(config, weights, backend, self.device, self.ops, self.ranks, self.experts)
        embedding = make.matrix("embed")
        self.dtype = embedding.dtype
        # Rounded to the dtype, because the model was trained with the rounded value.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        self.embedding = self.ops.vocabulary(embedding)
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else self.ops.vocabulary(make.matrix("lm_head"))
        self.norm = make.norm("norm")
        self.offload, count = offload, config.num_layers
        self.layers = list(map(make.layer, range(count))) if offload is None else offload.layers(make.layer, count)
        nexts = [*((layer.attn_norm, layer.qkv) for layer in self.layers[1:]), (self.norm, None)]
        self.tails = [self._tail(layer, *after) for layer, after in zip(self.layers, nexts, strict=True)]
        if offload is not None:
            self.tails = [offload.tail(index, tail) for index, tail in enumerate(self.tails)]
        self._borders: dict[int, Tail] = {}  # of layers that end a part, made when they first do
        own = make.draft_layer() if config.draft_layers else None
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
        reads the pool, and may wait for KV that is still loading; the other ranks do not wait. With a Stop this may
        raise Stopped. `scores` gets the logits of its rows part by part, so that memory never contains all logits of a
        long prompt. `others`: the batch in the blocks of each further group of layers with KV of tokens; `states`:
        where the requests keep their states. `on_hidden` gets what `forward_draft` needs of these tokens, [T, H].
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
        projected = first.qkv(self._entering(x, first))
        stop = before_layer if isinstance(before_layer, Stop) else None
        if self.layers_at_once is not None and on_layer is None and before_layer is stop and not tapped:
            layers = self.layers_at_once
            attended = layers.run(projected, x, kv_pool, step.plan, step.angles, step.local_angles, stop)
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
        entering: Tensor | Between,
        batch: RaggedBatch,
        kv_pool: Tensor,
        rows: Tensor,
        on_layer: Callable[[int], None] | None = None,
        goes_on: Callable[[int], bool] | None = None,
        attend: Attend | None = None,
    ) -> Tensor | Between:
        """Compute some of the layers, as one stage of a pipeline: their input `entering` [T, H], overwritten, -> the
        input of the layer after them [T, H]; behind the last layer, the logits [R, vocab_size] float32 of `rows`.

        goes_on(l): called before layer l reads the pool, where it may wait for KV and put it there, and again behind
        its attention. If it returns False, the pass ends there. The result is then a Between, with which another pass
        goes on with layer l: the two together call what one pass calls.

        `attend`: instead of the backend's attention, for keys that lie partly outside the pool; only for layers
        without a latent, a window and sinks.

        The other arguments are those of `forward`. The values between two stages are those between the same two layers
        of `forward`, so a pipeline computes what one node computes. Only on one rank, and without `offload`."""
        assert self.offload is None, "config/contradictions.py and Runner.why_whole keep such passes away"
        step, last = self._step(batch), len(self.layers) - 1
        attended = False
        if isinstance(entering, Between):
            assert entering.layer == layers[0]
            x, inner, attended = entering.x, entering.inner, entering.attended
        else:
            first = self.layers[layers[0]]
            x, inner = entering, first.qkv(self._entering(entering, first))
        for index in layers:
            if not attended:
                if goes_on is not None and not goes_on(index):
                    return Between(index, x, inner, attended=False)
                inner = self._attention(inner, self.layers[index], kv_pool[:, index], step, attend)
                if on_layer is not None:
                    on_layer(index)
            if goes_on is not None and not goes_on(index):
                return Between(index, x, inner, attended=True)
            attended = False
            if index == last:
                inner, x = inner[rows], x[rows]
            whole = index == last or index != layers[-1]
            x, inner = (self.tails[index] if whole else self._border(index))(inner, x)
        return self.logits(inner) if layers[-1] == last else x

    def kernels(self) -> dict[str, str]:
        """What computes, for people: of several levels or backends, those that were chosen when the model was made."""
        level = getattr(self.backend, "level", None)  # of our kernels on a CPU
        attention = self.backend.name if level is None else f"our kernels of level {level}"
        return {"attention": attention, "products": self.ops.name}

    def _entering(self, x: Tensor, layer: Layer) -> Tensor:
        """The input of the layer's first product."""
        return x if layer.attn_norm is None else self.ops.rms_norm(x, layer.attn_norm, self.config.rms_norm_eps)

    def _tail(self, layer: Layer, next_norm: Tensor | None, following: Linear | None) -> Tail:
        return tail_of(layer, next_norm, following, self.config, self.ops, self.ranks)

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
        if self.config.logit_divisor:
            logits = logits / self.config.logit_divisor
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
            for part, norm in ((q, layer.q_norm), (k, layer.k_norm)):
                rows = part.flatten(1) if config.joint_qk_norm else part
                part.copy_(self.ops.rms_norm(rows, norm, config.rms_norm_eps).view(part.shape))
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


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): about x if x is small, never above the cap; cap 0.0 leaves x unchanged."""
    return cap * (x / cap).tanh() if cap else x
