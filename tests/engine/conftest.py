"""Tiny models written on the spot, and the embedded one, loaded once."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.text.token_bytes import BYTE_OF
from engine.text.tokenizer import Tokenizer

TINY = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "mlp": 512, "layers": 2}
TINY_TOKENS = ["<|bos|>", "<|eos|>", *BYTE_OF, "he", "ll", "llo", "hello", "Ġhe"]
TINY_MERGES = ["h e", "l l", "ll o", "he llo", "Ġ he"]
TINY_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """GGUF names -> float32 values of a Llama model with the sizes of TINY."""
    random = np.random.default_rng(seed)
    t, vocab = TINY, len(TINY_TOKENS)
    q, kv = t["heads"] * t["head_size"], t["kv_heads"] * t["head_size"]
    shapes = {"token_embd.weight": (vocab, t["hidden"]), "output_norm.weight": (t["hidden"],)}
    for i in range(t["layers"]):
        for name, shape in {
            "attn_norm": (t["hidden"],),
            "attn_q": (q, t["hidden"]),
            "attn_k": (kv, t["hidden"]),
            "attn_v": (kv, t["hidden"]),
            "attn_output": (t["hidden"], q),
            "ffn_norm": (t["hidden"],),
            "ffn_gate": (t["mlp"], t["hidden"]),
            "ffn_up": (t["mlp"], t["hidden"]),
            "ffn_down": (t["hidden"], t["mlp"]),
        }.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def tiny_blocks(kind: str, others: dict[str, str]) -> dict[str, Any]:
    """tiny_tensors with matrices of random bytes in a GGUF type; `others` have another. The gguf package has no encoder
    of types in blocks of 256. Bytes below 64 make float16 numbers between 0 and 2."""
    random, held = np.random.default_rng(1), tiny_tensors()
    for name, values in tiny_tensors().items():
        if values.ndim == 2:
            type_ = gguf.GGMLQuantizationType[others.get(name, kind)]
            inputs, nbytes = gguf.GGML_QUANT_SIZES[type_]
            shape = values.shape[0], values.shape[1] // inputs * nbytes
            held[name] = random.integers(0, 64, shape, np.uint8), type_
    return held


def write_gguf(path, tensors, metadata=None):
    """`tensors`: name -> float32 array, or (raw bytes [..., row bytes], GGML type). `metadata`: changes, None drops."""
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    t = TINY
    fields = {
        "llama.block_count": t["layers"],
        "llama.context_length": 512,
        "llama.embedding_length": t["hidden"],
        "llama.feed_forward_length": t["mlp"],
        "llama.attention.head_count": t["heads"],
        "llama.attention.head_count_kv": t["kv_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TINY_TOKENS,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TINY_TOKENS) - 2),
        "tokenizer.ggml.merges": TINY_MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TINY_TEMPLATE,
    } | (metadata or {})
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in fields.items():
        if value is not None:
            add[type(value)](key, value)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, data, raw_dtype=None if data.dtype == np.float32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path):
    """Writes a tiny GGUF Llama file: tiny_gguf(tensors=None, metadata=None, name=...) -> path."""

    def write(tensors=None, metadata=None, name="tiny.gguf"):
        return write_gguf(tmp_path / name, tiny_tensors() if tensors is None else tensors, metadata)

    write.tensors, write.in_blocks = tiny_tensors, tiny_blocks
    write.num_tokens = len(TINY_TOKENS)
    return write


@pytest.fixture(scope="session")
def embedded():
    """ModelSource of the embedded model."""
    return describe(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def embedded_weights(embedded):
    """float32 weights of the embedded model, by our names."""
    torch.set_num_threads(1)
    return weights.load(embedded, torch.float32)


@pytest.fixture(scope="session")
def embedded_tokenizer(embedded):
    return Tokenizer.load(embedded)
