"""torch's tensors as values of the pool, and back. torch is imported by the first call: a store without tensors needs
none."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cache.named.tensor_format import HEAD_BYTES, NotATensor, TensorHead, shards
from connect.common.raw_memory import Pieces

if TYPE_CHECKING:
    import torch


def value_of(tensor: Any) -> Pieces | None:
    """The head and the elements, in host memory and C order; None for what upstream refuses, too: anything but a plain
    torch.Tensor, an unknown dtype, too many dimensions, elements without memory. Raises ImportError."""
    import torch

    if type(tensor) is not torch.Tensor or not _has_memory(tensor):
        return None
    try:
        return _value(_head(tensor), tensor)
    except NotATensor:
        return None


def values_of_shards(tensor: Any, count: int, dim: int) -> list[Pieces] | None:
    """The values of `count` equal parts of the tensor along `dim`; None as above, or if it has no such parts."""
    import torch

    if not isinstance(tensor, torch.Tensor) or not _has_memory(tensor):
        return None
    try:
        heads = shards(_head(tensor), count, dim)
        extent = tensor.shape[dim] // count
        return [_value(head, tensor.narrow(dim, rank * extent, extent)) for rank, head in enumerate(heads)]
    except NotATensor:
        return None


def tensor_in(value: Any) -> torch.Tensor | None:
    """The tensor whose head and elements are the writable buffer `value`, which it keeps; None if that is no tensor.
    Raises ImportError."""
    import torch

    try:
        head = TensorHead.unpack(value, len(value))
    except NotATensor:
        return None
    dtype = getattr(torch, head.dtype)
    if not head.nbytes:
        return torch.empty(head.shape, dtype=dtype)
    return torch.frombuffer(value, dtype=torch.uint8, offset=HEAD_BYTES).view(dtype).reshape(head.shape)


def tensor_at(address: int, nbytes: int) -> torch.Tensor | None:
    """The same of memory of the caller, which must keep it as long as the tensor."""
    if not address or nbytes < HEAD_BYTES:
        return None
    return tensor_in((ctypes.c_char * nbytes).from_address(address))


def _has_memory(tensor: torch.Tensor) -> bool:
    return str(tensor.layout) == "torch.strided" and tensor.device.type != "meta"


def _head(tensor: torch.Tensor) -> TensorHead:
    return TensorHead(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _value(head: TensorHead, tensor: torch.Tensor) -> Pieces:
    packed = Pieces.of(head.pack())
    elements = tensor.detach().cpu().contiguous().resolve_neg()
    rows = [(elements.data_ptr(), head.nbytes)] if head.nbytes else []
    return Pieces([*packed.pieces, *rows], (packed, elements))
