"""Tensors as the raw memory that net/collectives/ works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

OPS: dict[Any, str] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}


def op_name(op: Any) -> str:
    """Raises ValueError for a reduction that we do not have (PREMUL_SUM)."""
    for known, name in OPS.items():
        if op == known:
            return name
    raise ValueError(f"the backend mooncake has no reduction {op}")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check(*tensors: Tensor) -> None:
    """Raises ValueError for tensors that are not dense tensors in the memory of the CPU."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError(
                f"the backend mooncake takes dense tensors on the CPU, got {tensor.layout} on {tensor.device}"
            )


class Given:
    """Tensors to read. `memory` keeps what the addresses point to."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        check(*tensors)
        self.memory = [tensor.detach().contiguous() for tensor in tensors]
        self.addresses = [tensor.data_ptr() for tensor in self.memory]
        self.nbytes = [tensor.nbytes for tensor in self.memory]


class Into(Given):
    """Tensors to write. Strided ones are copied to and fro."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self.tensors = list(tensors)

    def finish(self) -> None:
        for tensor, memory in zip(self.tensors, self.memory, strict=True):
            if tensor.data_ptr() != memory.data_ptr() and tensor.numel():
                tensor.detach().copy_(memory)


def one(tensors: Sequence[Tensor]) -> Tensor:
    """Of the lists of one tensor that torch passes. Raises ValueError."""
    if len(tensors) != 1:
        raise ValueError(f"the backend mooncake takes one tensor per rank, got {len(tensors)}")
    return tensors[0]


def equal(tensors: Sequence[Tensor], like: Tensor, count: int, what: str) -> None:
    """Raises ValueError unless there are `count` tensors of the type and the number of elements of `like`."""
    if len(tensors) != count:
        raise ValueError(f"{what}: {count} tensors are needed, one per rank, got {len(tensors)}")
    for tensor in tensors:
        if tensor.dtype != like.dtype or tensor.numel() != like.numel():
            raise ValueError(
                f"{what}: tensors of {like.numel()} elements of {like.dtype} are needed, "
                f"got {tensor.numel()} of {tensor.dtype}"
            )
