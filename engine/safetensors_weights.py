"""SafetensorsWeights: tensors of a Hugging Face Llama directory, one file or shards, under our names, mapped lazily."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model_error import ModelError

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
}

COMPUTED = ".rotary_emb.inv_freq"
"""Old checkpoints carry the RoPE frequencies per layer; they follow from the configuration."""


class SafetensorsWeights:
    """A weights.Reader; a context manager."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._where: dict[str, tuple[Any, str]] = {}  # our name -> (open file, its name)
        for path in files:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{path} is not a whole safetensors file ({error}): fetch it again") from None
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if not name.endswith(COMPUTED):
                    self._where[our_name(name)] = (file, name)

    def __enter__(self) -> SafetensorsWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {ours: tuple(file.get_slice(name).get_shape()) for ours, (file, name) in self._where.items()}

    def read(self, name: str) -> Tensor:
        """As stored. The tensor owns its memory: the file may be closed or replaced afterwards."""
        file, theirs = self._where[name]
        tensor: Tensor = file.get_tensor(theirs)
        return tensor.clone()


def our_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `layers.3.q`; a name we do not know stays as it is."""
    if not name.startswith("model.layers."):
        return whole_names.get(name, name)
    _, _, layer, part = name.split(".", 3)
    return f"layers.{layer}.{layer_names[part]}" if part in layer_names else name
