"""One layer of some KV blocks as bytes on the CPU, out of the pool of any device and back into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_layer(kv_pool: Tensor, layer: int, block_ids: Sequence[int]) -> Tensor:
    """A copy of that layer of these blocks [n, layer bytes] uint8. kv_pool: see Runner."""
    return _bytes_of(kv_pool, layer)[_index(kv_pool, block_ids)].flatten(1).cpu()


def write_layer(kv_pool: Tensor, layer: int, block_ids: Sequence[int], data: Tensor) -> None:
    """Put what `read_layer` returned into that layer of these blocks."""
    target = _bytes_of(kv_pool, layer)
    target[_index(kv_pool, block_ids)] = data.to(kv_pool.device).view(len(block_ids), *target.shape[1:])


def layer_bytes(kv_pool: Tensor) -> int:
    """Of one layer of a block."""
    return kv_pool[0, 0].numel() * kv_pool.element_size()


def from_bytes(kv_pool: Tensor, data: memoryview, count: int) -> Tensor:
    """[count, layer bytes] uint8, without a copy. Raises ValueError if these are not the bytes of `count` blocks."""
    if count <= 0 or len(data) != count * layer_bytes(kv_pool):
        raise ValueError(f"{len(data)} bytes are not a layer of {count} blocks")
    return torch.frombuffer(data, dtype=torch.uint8).view(count, -1)


def _bytes_of(kv_pool: Tensor, layer: int) -> Tensor:
    """[num_blocks, K and V, heads, tokens, bytes of a head], whatever the type of the elements."""
    return kv_pool[:, layer].view(torch.uint8)


def _index(kv_pool: Tensor, block_ids: Sequence[int]) -> Tensor:
    return torch.tensor(block_ids, dtype=torch.int64, device=kv_pool.device)
