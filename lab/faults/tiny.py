"""A model that loads immediately, for benchmarks of everything except the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""Random weights: its tokens have no meaning, but every node computes the same ones."""


EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 12,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
"""Changes to CONFIG: a mixture of experts."""


def tiny_model(folder: Path, **changed: Any) -> list[str]:
    """Write the model into `folder`, with the embedded model's tokenizer; returns the flags that serve it. `changed`:
    fields of CONFIG."""
    from engine.checkpoint.model_source import describe
    from engine.config.config import EMBEDDED_MODEL
    from engine.text.tokenizer import Tokenizer

    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    Tokenizer.load(describe(EMBEDDED_MODEL)).save(folder / "tokenizer.json")
    return ["--model", str(folder), "--load-format", "dummy", "--dtype", "float32"]
