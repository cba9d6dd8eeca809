"""KV memory of simulated nodes that keep a stated number of blocks, however many requests they run."""

from __future__ import annotations

from dataclasses import replace

from lab.loads.trace import BLOCK_TOKENS
from lab.simulator.config import SimConfig
from lab.simulator.models.step_models import PAPER_NODE

RUNNING = PAPER_NODE.kv_tokens // BLOCK_TOKENS
"""Blocks of the model's memory on a node, for requests."""


def keeping(config: SimConfig, blocks: int) -> SimConfig:
    """The same nodes with `blocks` blocks of memory more than the model's, which keep prefixes: one arena has both."""
    return replace(config, kv_blocks=RUNNING + blocks, cache_blocks=blocks)
