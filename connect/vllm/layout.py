"""Layout: where the KV of a block lies in the memory of the engine, and in the pool. Pure.

In the engine each layer has its own row of blocks. In the pool a block is one value: its layers one after the other, in
the order of the engine's list of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class NotSupported(ValueError):
    """The engine keeps its KV in a way that cannot be moved; the message says which."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes. Block b of layer l lies at starts[l] + b * stride from `address` on and has layer_bytes."""

    address: int
    nbytes: int
    starts: Sequence[int]
    stride: int
    layer_bytes: int
    layer_of: Mapping[str, int]  # by name; a layer that uses the KV of another has the number of that one

    @property
    def block_bytes(self) -> int:
        return len(self.starts) * self.layer_bytes

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(offset in the value of a block, bytes) of each layer."""
        return [(layer * self.layer_bytes, self.layer_bytes) for layer in range(len(self.starts))]

    def places(self, layer: int, block_ids: Sequence[int]) -> list[int]:
        """Offsets from `address` of this layer of these blocks."""
        start = self.starts[layer]
        return [start + block_id * self.stride for block_id in block_ids]

    def pieces(self, block_id: int) -> list[tuple[int, int]]:
        """(address, bytes) of each layer of one block."""
        at = self.address + block_id * self.stride
        return [(at + start, self.layer_bytes) for start in self.starts]

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> Layout:
        """From the engine's KV tensors by layer, [blocks, ...] each. Raises NotSupported."""
        if not tensors:
            raise NotSupported("the engine has no KV cache")
        starts: dict[int, int] = {}  # address of a layer -> its number
        layer_of = {name: starts.setdefault(tensor.data_ptr(), len(starts)) for name, tensor in tensors.items()}
        first = next(iter(tensors.values()))
        storage = first.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        stride = first.stride(0) * first.element_size()
        layer_bytes = first[0].numel() * first.element_size()
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise NotSupported(f"the KV cache is on {tensor.device}; this connector moves KV in host memory")
            if tensor.untyped_storage().data_ptr() != address:
                raise NotSupported("the layers' KV caches are separate allocations")
            if not tensor[0].is_contiguous():
                raise NotSupported(f"a block of {name} is not contiguous: shape {tuple(tensor.shape)}")
            if (tensor.stride(0) * tensor.element_size(), tensor[0].numel() * tensor.element_size()) != (
                stride,
                layer_bytes,
            ):
                raise NotSupported("the layers have blocks of different sizes")
        return cls(address, nbytes, [start - address for start in starts], stride, layer_bytes, layer_of)
