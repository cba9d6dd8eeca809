"""KV arenas of ranks on several GPUs: each rank has its KV heads on its own GPU, and rank 0 sees all of them.

Rank 0 maps the arenas of the others into its own process (CUDA IPC, as torch sends a CUDA tensor to another process)
and copies for transfers by itself: the others need not be told, and never wait. It is in time without asking them: a
layer's KV is reported once rank 0's GPU is past the sum over the ranks that follows it, which is after every rank has
written; and what is copied in has arrived before a step that reads it is sent to the ranks.

No machine with several GPUs was at hand: over CUDA and NCCL none of this has run. The bytes and the way of the parts
between real processes are tested with CPU tensors and gloo (tests/e2e/test_split_arena.py); scripts/tools.py gpu-check
runs the rest where there are two GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention.codes import pool_in
from cache.block import BlockGeometry
from engine.core.kv_ready import KV_REGION
from engine.loading.split_arena import SplitArena
from engine.loading.split_memory import SplitMemory
from engine.model.gpu import gpu_of
from engine.model.parallel import Shard
from net.transfer.device.staging import DeviceRegion


def own_part(geometry: BlockGeometry, num_blocks: int, shard: Shard) -> Tensor:
    """One rank's heads of every block, empty: uint8 [bytes] on its GPU."""
    nbytes = num_blocks * part_of(geometry, shard).block_bytes
    return torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{shard.rank}")


def pool_of(part: Tensor, geometry: BlockGeometry, shard: Shard) -> Tensor:
    """The same memory in the shape that the rank's model reads: [num_blocks, num_layers, 2, its KV heads, ...]."""
    return pool_in(part, part_of(geometry, shard).shape, geometry.dtype)


def part_of(geometry: BlockGeometry, shard: Shard) -> BlockGeometry:
    """Of one rank's blocks."""
    return replace(geometry, num_kv_heads=shard.config.num_kv_heads)


def whole_arena(parts: Sequence[Tensor], geometry: BlockGeometry, shards: Sequence[Shard]) -> DeviceRegion:
    """All ranks' parts, in rank 0's process, as the node's arena of whole blocks."""
    head_bytes = geometry.block_size * geometry.row_bytes
    heads = [shard.kv_heads for shard in shards]
    split = SplitArena(parts, heads, geometry.num_kv_heads, head_bytes, gpu_of(parts[0].device))
    return DeviceRegion(KV_REGION, SplitMemory(split))
