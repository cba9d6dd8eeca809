"""Tensor parallelism: the part of a model on each rank, and the collectives of a forward pass.

Rank r of n computes num_heads / n heads and 1 / n of the columns of every MLP and expert (Megatron's split):

    qkv, gate, up     rows of the weight [out, in]        no communication
    q_b, kv_b         rows: the heads of latent attention no communication
    o, down           columns of the weight               partial results, summed over the ranks
    lm_head           rows, padded to a multiple of n     logits, gathered on rank 0
    embed, norms, router, q_a, kv_a                       whole on every rank

KV heads are split with the query heads that use them; with fewer KV heads than ranks, neighbours have the same one, as
all ranks have the row of a latent. For transfers, the pool and other nodes, a KV block stays whole (cache/block.py).
Ranks on CPUs share the arena's memory and write their heads to it; two ranks with the same KV head write the same
bytes.
Ranks on GPUs have separate arenas, which rank 0 combines (engine/loading/rank_arenas.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from engine.model.model_config import ModelConfig

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Ranks run the same step concurrently; a rank that is this late is considered dead."""

BY_OUTPUT = ("q", "q_b", "kv_b", "gate", "up", "q_bias", "gate_bias", "up_bias", "sinks")
BY_KV_HEAD = ("k", "v", "k_bias", "v_bias")
BY_INPUT = ("o", "down")


class Ranks(Protocol):
    """The collectives of a forward pass; every rank calls them in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """x [T, H] summed over the ranks; its memory may be reused."""

    def gather(self, part: Tensor) -> Tensor:
        """part [R, columns], of equal shape on all ranks -> [R, ranks * columns] on rank 0; other ranks get `part`."""


class Alone:
    """One process has the whole model."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, part: Tensor) -> Tensor:
        return part


class ProcessRanks:
    """Gloo on CPUs, NCCL on GPUs (NCCL is untested, for lack of a machine with several GPUs).

    Blocks until all ranks are connected. Raises RuntimeError, here and in the collectives, if a rank is gone or
    COLLECTIVE_TIMEOUT has passed; the ranks are then out of step and must all end.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        """`store`: a torch.distributed.Store in which the ranks find each other."""
        self.rank, self.size = rank, size
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host, whose name may not resolve
            self._group = dist.ProcessGroupGloo(store, rank, size, COLLECTIVE_TIMEOUT)
        self.sum(torch.zeros(1, device=device))  # all are connected once this returns

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [part], options).wait()
        return torch.cat(parts, dim=-1) if parts else part

    def abort(self) -> None:
        """With NCCL, from any thread: end collectives that wait on the GPU for a lost rank, without a result."""
        self._group.abort()


class OwnRanks:
    """Our collectives (net/collectives/) between ranks on CPUs: shared memory. Blocks and raises as ProcessRanks."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        from net.collectives.epochs import GroupOptions  # kernels on a bare GPU machine lack what these import
        from net.collectives.group import RankGroup

        self.rank, self.size = rank, size
        self._group = RankGroup(store, rank, size, GroupOptions(COLLECTIVE_TIMEOUT.total_seconds()))
        self.sum(torch.zeros(1))  # nobody reads the store any more once this returns

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.all_reduce(x.data_ptr(), x.data_ptr(), x.numel(), dtype_name(x.dtype), "sum")
        return x

    def gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather(part.data_ptr(), [one.data_ptr() for one in parts], part.nbytes, 0)
        return torch.cat(parts, dim=-1) if parts else part

    def abort(self) -> None:
        """From any thread: end the calls, which fail."""
        self._group.close()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def connected(store: Any, rank: int, size: int, device: torch.device, collectives: str) -> ProcessRanks | OwnRanks:
    """The ranks of a node by --collectives, which concerns CPUs."""
    if device.type == "cpu" and collectives == "mooncake":
        return OwnRanks(store, rank, size)
    return ProcessRanks(store, rank, size, device)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model `whole`, which `size` divides (ModelConfig.indivisible)."""

    whole: ModelConfig
    rank: int
    size: int

    @property
    def config(self) -> ModelConfig:
        """The configuration of this rank's Model. It has a separate head: a tied one is cut from the embedding."""
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.size,
            num_kv_heads=self._num_kv_heads,
            intermediate_size=max(1, self.whole.intermediate_size // self.size),
            expert_size=self.whole.expert_size // self.size,
            shared_size=self.whole.shared_size // self.size,
            tie_word_embeddings=False,
        )

    @property
    def _num_kv_heads(self) -> int:
        return max(1, self.whole.num_kv_heads // self.size)

    @property
    def kv_heads(self) -> slice:
        """This rank's heads of a KV block."""
        first = self.rank * self.whole.num_kv_heads // self.size
        return slice(first, first + self._num_kv_heads)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of the whole model's weight `name` (engine/checkpoint/weights.py)."""
        kind = name.rpartition(".")[2]
        if kind in BY_OUTPUT:
            return tensor.tensor_split(self.size, dim=0)[self.rank]
        if kind in BY_KV_HEAD:
            rows = len(tensor) // self.whole.num_kv_heads
            return tensor[self.kv_heads.start * rows : self.kv_heads.stop * rows]
        if kind in BY_INPUT:
            return tensor.tensor_split(self.size, dim=1)[self.rank]
        if kind == "lm_head":
            rows = -(-len(tensor) // self.size)
            part = tensor[self.rank * rows : (self.rank + 1) * rows]
            return F.pad(part, (0, 0, 0, rows - len(part))) if len(part) < rows else part
        if kind in ("o_bias", "down_bias"):
            return tensor if self.rank == 0 else torch.zeros_like(tensor)  # summed once
        return tensor
