"""SafetensorsWeights: tensors of a Hugging Face directory, one file or shards, under our names, mapped lazily."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.fused_rows import Rows, rows_of
from engine.checkpoint.joined_experts import Part, parts_of
from engine.checkpoint.row_order import reordered
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError

whole_names = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "lm_head"}

layer_names = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "o_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "self_attn.sinks": "sinks",
    "mlp.router.weight": "router",
    "mlp.router.bias": "router_bias",
    "mlp.gate.weight": "router",
    "block_sparse_moe.gate.weight": "router",
    "self_attn.q_a_proj.weight": "q_a",
    "self_attn.q_a_layernorm.weight": "q_a_norm",
    "self_attn.q_b_proj.weight": "q_b",
    "self_attn.kv_a_proj_with_mqa.weight": "kv_a",
    "self_attn.kv_a_layernorm.weight": "kv_a_norm",
    "self_attn.kv_b_proj.weight": "kv_b",
    "mlp.gate.e_score_correction_bias": "router_bias",
    "mlp.shared_experts.gate_proj.weight": "shared.gate",
    "mlp.shared_experts.up_proj.weight": "shared.up",
    "mlp.shared_experts.down_proj.weight": "shared.down",
    "mlp.shared_expert.gate_proj.weight": "shared.gate",
    "mlp.shared_expert.up_proj.weight": "shared.up",
    "mlp.shared_expert.down_proj.weight": "shared.down",
    "mlp.shared_expert_gate.weight": "shared_router",
    "linear_attn.in_proj_qkvz.weight": "qkvz",
    "linear_attn.in_proj_ba.weight": "ba",
    "linear_attn.conv1d.weight": "conv",
    "linear_attn.A_log": "log_decay",
    "linear_attn.dt_bias": "dt",
    "linear_attn.norm.weight": "delta_norm",
    "linear_attn.out_proj.weight": "o",
    "self_attn.b_proj.weight": "b",
    "self_attn.f_a_proj.weight": "f_a",
    "self_attn.f_b_proj.weight": "f_b",
    "self_attn.g_a_proj.weight": "g_a",
    "self_attn.g_b_proj.weight": "g_b",
    "self_attn.q_conv1d.weight": "q_conv",
    "self_attn.k_conv1d.weight": "k_conv",
    "self_attn.v_conv1d.weight": "v_conv",
    "self_attn.A_log": "log_decay",
    "self_attn.dt_bias": "dt",
    "self_attn.o_norm.weight": "delta_norm",
    "block_sparse_moe.gate.e_score_correction_bias": "router_bias",
    "block_sparse_moe.gate_proj.weight": "gate",  # of dense layers, as transformers writes them
    "block_sparse_moe.up_proj.weight": "up",
    "block_sparse_moe.down_proj.weight": "down",
    "block_sparse_moe.shared_experts.gate_proj.weight": "shared.gate",
    "block_sparse_moe.shared_experts.up_proj.weight": "shared.up",
    "block_sparse_moe.shared_experts.down_proj.weight": "shared.down",
    "enorm.weight": "enorm",
    "hnorm.weight": "hnorm",
    "eh_proj.weight": "eh",
    "shared_head.norm.weight": "head_norm",
}

gemma_names = layer_names | {
    "post_attention_layernorm.weight": "attn_post_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "mlp_post_norm",
}
"""If outputs are normalised, the same name means another norm."""

glm_names = layer_names | {
    "post_self_attn_layernorm.weight": "attn_post_norm",
    "post_mlp_layernorm.weight": "mlp_post_norm",
}
"""GLM-4 keeps the meaning of that name."""

expert_names = {
    "gate_proj.weight": "gate",
    "up_proj.weight": "up",
    "down_proj.weight": "down",
    "w1.weight": "gate",
    "w3.weight": "up",
    "w2.weight": "down",
}
"""After mlp.experts.E. (Qwen) or block_sparse_moe.experts.E. (Mixtral)."""

SHARED = ("embed_tokens.", "shared_head.head.")
"""After model.layers.N. of the layer that drafts: copies of the model's own embedding and head."""

COMPUTED = ".rotary_emb.inv_freq"
"""Old checkpoints contain the RoPE frequencies of each layer, which follow from the configuration."""


class SafetensorsWeights:
    """A weights.Reader; a context manager."""

    def __init__(self, files: Sequence[Path], config: ModelConfig) -> None:
        self._stack = ExitStack()
        names = names_of(config)
        skipped = _skipped(config)
        self._config = config
        self._where: dict[str, tuple[Any, str]] = {}  # our name -> (open file, its name)
        self._joined: dict[str, Part | Rows] = {}  # our name -> its part of a tensor
        for path in files:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{path} is not a whole safetensors file ({error}): fetch it again") from None
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if config.together and (parts := parts_of(file, name)):
                    self._joined |= parts
                elif config.fused and (rows := rows_of(file, name, config)):
                    self._joined |= rows
                elif not name.endswith(COMPUTED) and not name.startswith(skipped):
                    self._where[our_name(name, names)] = (file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        whole = {ours: tuple(file.get_slice(name).get_shape()) for ours, (file, name) in self._where.items()}
        return whole | {ours: part.shape for ours, part in self._joined.items()}

    def read(self, name: str) -> Tensor:
        """The tensor as stored. It owns its memory: the file may be closed or replaced afterwards."""
        if name in self._joined:
            return self._joined[name].read()
        tensor = self._whole(name)
        if not tensor.is_floating_point():
            raise ModelError(
                f"{self._where[name][1]} is of type {str(tensor.dtype).removeprefix('torch.')}, and config.json has no "
                "quantization_config that says what its numbers mean"
            )
        ordered = self._config.gated or self._config.interleaved
        return (reordered(name, tensor, self._config) if ordered else tensor).clone()

    def _whole(self, name: str) -> Tensor:
        """The tensor of a file, of any type; it may lie in the file's memory."""
        file, theirs = self._where[name]
        tensor: Tensor = file.get_tensor(theirs)
        return tensor


def _skipped(config: ModelConfig) -> tuple[str, ...]:
    """The beginnings of names of weights that are not loaded: of layers that draft, if this node does not use them."""
    used = range(config.num_layers, config.loaded_layers)
    unused = range(config.loaded_layers, config.num_layers + config.num_draft_layers)
    skipped = [f"model.layers.{layer}." for layer in unused]
    skipped += [f"model.layers.{layer}.{name}" for layer in used for name in SHARED]
    if config.gated:
        skipped.append("mtp.")  # Qwen3-Next's, which its config.json does not mention
    return tuple(skipped)


def names_of(config: ModelConfig) -> Mapping[str, str]:
    """Checkpoints' names of the weights in a layer -> ours."""
    if not config.post_norms:
        return layer_names
    return glm_names if config.interleaved else gemma_names  # GLM-4 is the only family of interleaved heads


def checkpoint_names(ours: Iterable[str], config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The names that checkpoints have for weights with these names of ours: several where families differ."""
    whole = _inverse(whole_names)
    layer, expert = _inverse(names_of(config)), _inverse(expert_names)
    found: dict[str, tuple[str, ...]] = {}
    for name in ours:
        if name in whole:
            found[name] = whole[name]
            continue
        _, number, part = name.split(".", 2)
        _, experts, inner = part.partition("experts.")
        index, _, matrix = inner.partition(".")
        at = f"model.layers.{number}."
        if experts:
            theirs = [each for each in expert[matrix] if each.startswith("w")]
            found[name] = (
                *(f"{at}mlp.experts.{index}.{each}" for each in expert[matrix] if each not in theirs),
                *(f"{at}block_sparse_moe.experts.{index}.{each}" for each in theirs),
            )
        else:
            found[name] = tuple(at + each for each in layer[part])
    return found


def _inverse(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for theirs, ours in names.items():
        found[ours] = (*found.get(ours, ()), theirs)
    return found


def our_name(name: str, names: Mapping[str, str] = layer_names) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `layers.3.q`, `model.layers.3.mlp.experts.7.up_proj.weight` ->
    `layers.3.experts.7.up`; unknown names stay unchanged."""
    if not name.startswith("model.layers."):
        return whole_names.get(name, name)
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    if part in names:
        return f"layers.{layer}.{names[part]}"
    _, experts, inner = part.partition(".experts.")
    expert, _, matrix = inner.partition(".")
    return f"layers.{layer}.experts.{expert}.{expert_names[matrix]}" if experts and matrix in expert_names else name
