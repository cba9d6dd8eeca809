"""Tensors of a GGUF file under our names, dequantised, with q and k in Hugging Face's row order.

GGUF stores a Llama's q and k for interleaved RoPE: within a head, row 2i is row i of the half-split order, and row
2i + 1 is its row i + head_size/2. `read` restores the half-split order; without this, the model writes fluent nonsense.
Qwen's q and k are in Hugging Face's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import gguf
import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.gguf.file import GGUFFile
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.model.ops.quantized import Quantized

whole_names = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "lm_head"}

layer_names = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_output.bias": "o_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
}

ROPE_TABLE = "rope_freqs.weight"
"""Not a weight: gguf_config.py reads it as RoPE scaling."""

INTERLEAVED = ("llama",)
"""Architectures whose rows of q and k are stored in pairs."""


class GGUFWeights:
    """A weights.Reader; a context manager."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GGUFFile(path)
        interleaved = self._file.metadata.get("general.architecture") in INTERLEAVED
        self._heads = {"q": config.num_heads, "k": config.num_kv_heads} if interleaved else {}
        self._names = {our_name(name): name for name in self._file.tensors if name != ROPE_TABLE}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {ours: self._file.tensors[theirs].shape for ours, theirs in self._names.items()}

    def kinds(self) -> Mapping[str, str]:
        """Every weight -> its type in the file: q4_1, f32."""
        return {ours: self._file.tensors[theirs].type.name.lower() for ours, theirs in self._names.items()}

    def stored(self, name: str, dtype: torch.dtype) -> Quantized:
        """A matrix as it is in the file, for products in `dtype`; its type is a kind of ops/quantized.py."""
        tensor = self._file.tensors[self._names[name]]
        kind = tensor.type.name.lower()
        rows = torch.frombuffer(self._file.raw(tensor.name), dtype=torch.uint8).view(tensor.shape[0], -1)
        return Quantized(kind, self._half_split(name, rows), dtype)

    def read(self, name: str) -> Tensor:
        """float32, [out, in]. Raises ModelError for a type that cannot be dequantised."""
        tensor = self._file.tensors[self._names[name]]
        rows = np.frombuffer(self._file.raw(tensor.name), np.uint8).reshape(*tensor.shape[:-1], -1)
        try:
            values = torch.from_numpy(gguf.dequantize(rows, tensor.type))
        except NotImplementedError:
            raise ModelError(
                f"{self._file.path.name}: {tensor.name} has type {tensor.type.name}, which the gguf package cannot "
                "dequantise; use a file in Q8_0, Q4_K, Q6_K, F16 or another common type"
            ) from None
        return self._half_split(name, values)

    def _half_split(self, name: str, rows: Tensor) -> Tensor:
        kind = name.rpartition(".")[2].removesuffix("_bias")
        return half_split(rows, self._heads[kind]) if kind in self._heads else rows


def our_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `layers.3.q`; unknown names stay unchanged."""
    if not name.startswith("blk."):
        return whole_names.get(name, name)
    layer, _, part = name.removeprefix("blk.").partition(".")
    return f"layers.{layer}.{layer_names[part]}" if part in layer_names else name


def half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Rows [num_heads * head_size, ...] from the interleaved to the half-split order of RoPE pairs."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])  # [num_heads, head_size / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)
