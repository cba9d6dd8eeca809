"""ModelConfig: the shape of a decoder, read from any kind of file (hf_config.py, gguf_config.py).

Model families differ only in these fields: the Llama, Mistral, Qwen, Gemma, DeepSeek, gpt-oss and Kimi Linear families,
dense or with experts, with attention or states, share one forward pass (engine/model/decoder.py). Does not import
torch: a store node needs only the geometry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.model.delta_config import Delta
from engine.model.eagle_config import Eagle
from engine.model.experts.routing_config import Routing
from engine.model.experts.shares import problem as sharing_problem
from engine.model.latent_config import Latent
from engine.model.model_error import ModelError
from engine.model.rope_scaling import problem

ACTIVATIONS = ("silu", "gelu_tanh", "clamped")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes in elements, lengths in tokens."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Heads of K and V; 1 if a latent serves all heads."""
    head_size: int
    """Of a head of K and V, or of the latent row."""
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """Type of most weights in the checkpoint: a torch dtype name, or a GGUF type such as "q4_1"."""

    # --- positions
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """None, or config.json's rope parameters with "rope_type" and the keys that SCALINGS lists for it."""
    local_rope_theta: float = 0.0
    """Of layers with a window, unscaled, if they have their own (Gemma 3); 0: rope_theta."""
    rotary_size: int = 0
    """Elements at the beginning of a head that are rotated; 0: all."""
    interleaved: bool = False
    """Checkpoints have the two elements of a rotated pair side by side (GLM-4; a latent has a field of its own)."""

    # --- attention
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Every head of q and k is normalised before the rotary embedding."""
    joint_qk_norm: bool = False
    """All heads of q are normalised together, and all of k (OLMo 2)."""
    windows: tuple[int, ...] = ()
    """Per layer, the tokens that a row sees, including itself; 0: all. Empty: all tokens in every layer."""
    query_scale_size: int = 0
    """Scores are multiplied by query_scale_size**-0.5; 0: the head size."""
    score_scale: float = 0.0
    """Scores are multiplied by it (Granite); 0: as query_scale_size says."""
    latent: Latent | None = None
    """Keys and values of all heads follow from one row per token; None: K and V per head are kept."""
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    """Scores and logits become cap * tanh(x / cap); 0: unchanged."""
    logit_divisor: float = 0.0
    """Logits are divided by it (Granite); 0: unchanged."""
    sinks: bool = False
    """Every head has one more score, learnt, whose key has no value (gpt-oss)."""
    gated: bool = False
    """A head's output is multiplied by the sigmoid of a gate, computed as q is (Qwen3-Next)."""
    delta: Delta | None = None
    """Layers that keep a state instead of keys and values."""

    # --- norms and multi-layer perceptrons
    rms_norm_eps: float = 1e-5
    norm_plus_one: bool = False
    """Norm weights are stored minus one, and multiplied before rounding (Gemma)."""
    post_norms: bool = False
    """The outputs of attention and MLP are normalised before they are added (Gemma)."""
    no_input_norms: bool = False
    """The inputs of attention and MLP are not normalised (OLMo 2)."""
    embedding_scale: float = 1.0
    branch_scale: float = 0.0
    """The outputs of attention and MLP are multiplied by it before they are added (Granite); 0: unchanged."""
    activation: str = "silu"
    """Of ACTIVATIONS; clamped: gpt-oss' gate (Ops.clamped_mul), which only experts have."""
    gate_limit: float = 0.0
    """Of clamped: gate and up are cut to it."""

    # --- mixture of experts
    num_experts: int = 0
    """0: a dense MLP in every layer."""
    experts_per_token: int = 0
    expert_size: int = 0
    """intermediate_size of one expert."""
    normalize_experts: bool = True
    """The weights of a token's experts sum to one; otherwise they are their softmax among all experts."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense MLP although num_experts > 0."""
    routing: Routing | None = None
    """How experts are chosen; None: those with the largest shares of a softmax."""
    shared_size: int = 0
    """intermediate_size of the expert that every token also passes through; 0: none."""
    shared_gate: bool = False
    """Its output is multiplied by the sigmoid of one number per token."""
    expert_biases: bool = False
    """The router and all products of experts have biases."""
    together: bool = False
    """Checkpoints keep all experts of a layer in one tensor, in which rows of gate and up alternate."""
    fused: bool = False
    """Checkpoints keep gate and up in one tensor, and some families q, k and v too (Phi-3, GLM-4)."""
    num_draft_layers: int = 0
    """Layers of the checkpoint after the last one, which predict further tokens."""
    draft_layers: int = 0
    """Of these, the layers that this node loads and computes: 1 with --speculative-method mtp."""
    eagle: Eagle | None = None
    """A head that drafts, from a checkpoint of its own."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "intermediate_size"):
            check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, must be positive")
        check(self.vocab_size >= 1, f"vocab_size is {self.vocab_size}, must be positive")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly",
        )
        check(self.rope_size % 2 == 0, f"head size {self.rope_size} is odd: RoPE rotates pairs")
        if self.latent is not None:
            wrong = self.latent.problem()
            check(wrong is None, str(wrong))
            check(
                (self.num_kv_heads, self.head_size) == (1, self.latent.row_size),
                f"{self.num_kv_heads} KV heads of {self.head_size} are not one latent row of {self.latent.row_size}",
            )
        check(
            0 <= self.rotary_size <= self.head_size and (self.head_size - self.rotary_size) % 2 == 0,
            f"{self.rotary_size} of {self.head_size} elements of a head cannot be rotated in pairs",
        )
        if self.delta is not None:
            wrong = self.delta.problem(self.num_layers)
            check(wrong is None, str(wrong))
        check(
            self.draft_layers <= min(1, self.num_draft_layers),
            f"{self.draft_layers} layers that draft, of {self.num_draft_layers} in the checkpoint",
        )
        if self.rope_scaling is not None:
            wrong = problem(self.rope_scaling)
            check(wrong is None, str(wrong))
        check(len(self.windows) in (0, self.num_layers), f"{len(self.windows)} windows for {self.num_layers} layers")
        check(all(window >= 0 for window in self.windows), f"sliding_window is {min(self.windows, default=0)}")
        check(self.activation in ACTIVATIONS, f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        check(
            self.activation != "clamped" or (self.num_experts > 0 and not self.dense_layers and self.gate_limit > 0),
            f"activation clamped needs experts in every layer and a positive swiglu_limit, not {self.gate_limit}",
        )
        if self.num_experts:
            check(
                1 <= self.experts_per_token <= self.num_experts,
                f"num_experts_per_tok is {self.experts_per_token}, the model has {self.num_experts} experts",
            )
            check(self.expert_size >= 1, f"moe_intermediate_size is {self.expert_size}, must be positive")
            if self.routing is not None:
                wrong = self.routing.problem(self.num_experts, self.experts_per_token)
                check(wrong is None, str(wrong))

    def window(self, layer: int) -> int:
        """Tokens that a row of this layer sees, including itself; 0: all."""
        return self.windows[layer] if self.windows else 0

    def has_state(self, layer: int) -> bool:
        """Whether the layer keeps a state instead of keys and values."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def states(self) -> tuple[bool, ...]:
        """Which layers keep a state; empty: none."""
        return () if self.delta is None else tuple(map(self.has_state, range(self.num_layers)))

    def state_bytes(self, item_bytes: int) -> int:
        """Of one layer with a state, in a KV pool with elements of `item_bytes`; 0: no layer has one."""
        return 0 if self.delta is None else self.delta.state_bytes(item_bytes)

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    def indivisible(self, ranks: int) -> str | None:
        """Why tensor parallelism cannot split this model over `ranks` ranks; None if it can."""
        if self.delta is not None and ranks > 1:
            return "layers that keep a state are computed by one rank"
        if self.joint_qk_norm and ranks > 1:
            return "q and k are normalised over all heads together, which one rank must have"
        sizes = {"attention heads": self.num_heads}
        if any(not self.has_experts(layer) for layer in range(self.num_layers)):
            sizes["MLP columns"] = self.intermediate_size
        if self.num_experts:
            sizes["columns of an expert"] = self.expert_size
            sizes["columns of the shared expert"] = self.shared_size
        for what, size in sizes.items():
            if size % ranks:
                return f"the model's {size} {what} do not divide by {ranks}"
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            return f"the model's {self.num_kv_heads} KV heads can neither be split nor repeated over {ranks}"
        return None

    def unshareable(self, ranks: int, least: int, redundant: int) -> str | None:
        """Why its experts cannot be shared out over `ranks` ranks, with `least` copies of each and `redundant` more;
        None if they can."""
        return sharing_problem(self.num_experts, ranks, least, redundant)

    @property
    def loaded_layers(self) -> int:
        """Layers whose weights this node reads from the model's checkpoint."""
        return self.num_layers + self.draft_layers

    @property
    def kv_layers(self) -> int:
        """Layers with KV or a state: the layer that drafts comes last."""
        return self.loaded_layers + (self.eagle is not None)

    @property
    def kv_kind(self) -> str:
        """The kind of its KV blocks (cache/block.py)."""
        return "full" if self.latent is None else "latent"

    @property
    def rope_size(self) -> int:
        """Elements of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_size
        return self.rotary_size or self.head_size

    @property
    def attention_scale(self) -> float:
        if self.latent is not None:
            return float(self.latent.query_size**-0.5 * self.latent.sharpness)
        return self.score_scale or float((self.query_scale_size or self.head_size) ** -0.5)

    @property
    def num_parameters(self) -> int:
        """The number of weights, without norms and biases."""
        states = sum(self.states)
        attention = (self.loaded_layers - states) * self._attention_parameters + states * self._delta_parameters
        mlp = 3 * self.hidden_size * self.intermediate_size
        shared = 3 * self.shared_size + self.shared_gate
        experts = self.hidden_size * (self.num_experts * (3 * self.expert_size + 1) + shared)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        sparse = sum(self.has_experts(layer) for layer in range(self.loaded_layers))
        drafting = self.draft_layers * 2 * self.hidden_size**2
        if self.eagle is not None:
            heads = self.num_heads, self.num_kv_heads, self.head_size
            drafting += self.eagle.parameters(self.hidden_size, *heads, self.vocab_size)
        return attention + sparse * experts + (self.loaded_layers - sparse) * mlp + drafting + embeddings

    @property
    def _attention_parameters(self) -> int:
        """Of one layer's matrices."""
        hidden, heads, latent = self.hidden_size, self.num_heads, self.latent
        if latent is None:
            return hidden * self.head_size * (2 * (heads + self.num_kv_heads) + heads * self.gated)
        query = latent.query_rank * (hidden + heads * latent.query_size) or hidden * heads * latent.query_size
        values = heads * latent.value_size
        return query + hidden * (latent.row_size + values) + latent.rank * (heads * latent.nope_size + values)

    @property
    def _delta_parameters(self) -> int:
        """Of the matrices of one layer with a state, and its convolution."""
        if self.delta is None:
            return 0
        of_hidden, others = self.delta.parameters
        return self.hidden_size * of_hidden + others


def check(ok: bool, message: str) -> None:
    """Raises ModelError with `message` unless ok."""
    if not ok:
        raise ModelError(message)


def token_ids(*values: Any) -> tuple[int, ...]:
    """All ids in numbers and lists of numbers, in order, each once."""
    ids: dict[int, None] = {}
    for value in values:
        if value is not None:
            ids.update(dict.fromkeys([value] if isinstance(value, int) else value))
    return tuple(ids)
