"""A model on the CPU with room for KV, as a node runs it, but without a node."""

from __future__ import annotations

import torch

from attention.choice.choose import choose
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.model.decoder import Model
from engine.model.ops.choice import choose_ops
from engine.step.runner import Runner

BLOCK_SIZE = 16


def runner_of(model: str, dtype: str) -> Runner:
    """A runner with room for 8,192 tokens of KV."""
    source = describe(model)
    config, kind = source.config, getattr(torch, dtype)
    backend = choose("auto", "cpu", config.head_size)
    ops = choose_ops(backend.name, "cpu", kind)
    loaded = Model(config, weights.load(source, kind), backend, "cpu", ops)
    pool = torch.zeros(512, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size, dtype=kind)
    return Runner(loaded, pool, BLOCK_SIZE)
