"""A KV arena in parts, one per tensor-parallel rank, seen as one arena of whole blocks.

Transfers, the pool and other nodes know whole blocks, [num_layers, 2, num_kv_heads, block_size, head_size]. Rank r has
[num_blocks, num_layers, 2, its KV heads, block_size, head_size] on its own GPU. A *plane* is K or V of one layer of one
block, [num_kv_heads, block_size, head_size]; it has the same number in the arena and in every part:

    arena    plane p   [ head 0 | head 1 | head 2 | head 3 ]
    rank 0   plane p   [ head 0 | head 1 ]                      its columns of the plane, in bytes
    rank 1   plane p                     [ head 2 | head 3 ]

Whole planes, as layers and blocks are, meet on rank 0's GPU over the links between the GPUs and cross the bus as one
copy. What staging cut inside a plane (its buffers end anywhere) goes straight to the ranks, in pieces. A KV head that
several ranks hold is read from the first of them and written to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.loading.cuda_memory import Move
from engine.model.gpu import Gpu, Host

Stretch = tuple[int, list[int]]
"""(offset in host memory, numbers of the planes that lie there side by side)"""


class SplitArena:
    """The same bytes as one tensor would have that is never put together."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        heads: Sequence[slice],
        num_kv_heads: int,
        head_bytes: int,
        gpu: Gpu | None = None,
    ) -> None:
        """parts: uint8 [bytes] of every rank, on its device; heads: which of the `num_kv_heads` it has, as in
        Shard.kv_heads; head_bytes: of one head of a plane, its scales included; gpu: whose memory the parts are, the
        host's by default. Raises ValueError on parts of unequal numbers of planes."""
        self._gpu = gpu or Host()
        self._columns = [slice(held.start * head_bytes, held.stop * head_bytes) for held in heads]
        self.parts = parts
        self._planes = [part.view(-1, own.stop - own.start) for part, own in zip(parts, self._columns, strict=True)]
        if len({len(planes) for planes in self._planes}) != 1:
            raise ValueError(
                f"all parts of one arena must have the same number of planes, not {[len(one) for one in self._planes]}"
            )
        self._plane_bytes = num_kv_heads * head_bytes
        self._readers = [rank for rank, own in enumerate(self._columns) if own not in self._columns[:rank]]
        self.nbytes = len(self._planes[0]) * self._plane_bytes

    def copy_out(self, host: Tensor, moves: Sequence[Move]) -> None:
        """As engine.loading.cuda_memory.copy_out; asynchronous on every part's current stream."""
        home = self.parts[0]
        stretches, pieces = self._cut(moves)
        for at, planes in stretches:
            heads = [self._planes[rank].index_select(0, self._index(planes, rank)) for rank in self._readers]
            whole = torch.cat([self._gpu.move(part, home) for part in heads], dim=1)
            host[at : at + whole.numel()].copy_(whole.flatten(), non_blocking=True)
        for here, there in self._pieces(host, pieces, self._readers):
            there.copy_(here, non_blocking=True)

    def copy_in(self, host: Tensor, moves: Sequence[Move]) -> None:
        """The other way."""
        home = self.parts[0]
        stretches, pieces = self._cut(moves)
        for at, planes in stretches:
            whole = self._gpu.move(host[at : at + len(planes) * self._plane_bytes], home)
            whole = whole.view(-1, self._plane_bytes)
            for rank, (mine, own) in enumerate(zip(self._planes, self._columns, strict=True)):
                heads = self._gpu.move(whole[:, own].contiguous(), mine)
                mine.index_copy_(0, self._index(planes, rank), heads)
        for here, there in self._pieces(host, pieces, range(len(self.parts))):
            here.copy_(there, non_blocking=True)

    def _index(self, planes: Sequence[int], rank: int) -> Tensor:
        return self._gpu.index(planes, self.parts[rank])

    def _cut(self, moves: Sequence[Move]) -> tuple[list[Stretch], list[Move]]:
        """Whole planes, together where their bytes in host memory are, and pieces that lie within one plane."""
        stretches: list[Stretch] = []
        pieces: list[Move] = []
        size = self._plane_bytes
        for here, there, length in moves:
            end = here + length
            while here < end:
                plane, offset = divmod(here, size)
                if offset or end - here < size:
                    step = min(size - offset, end - here)
                    pieces.append((here, there, step))
                else:
                    planes = range(plane, end // size)
                    step = len(planes) * size
                    if stretches and stretches[-1][0] + len(stretches[-1][1]) * size == there:
                        stretches[-1][1].extend(planes)
                    else:
                        stretches.append((there, [*planes]))
                here, there = here + step, there + step
        return stretches, pieces

    def _pieces(self, host: Tensor, pieces: Sequence[Move], ranks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """(bytes of a part, their place in `host`) for what each of `ranks` has of the pieces."""
        for here, there, length in pieces:
            plane, offset = divmod(here, self._plane_bytes)
            for rank in ranks:
                own = self._columns[rank]
                start, stop = max(offset, own.start), min(offset + length, own.stop)
                if start < stop:
                    mine = self._planes[rank][plane, start - own.start : stop - own.start]
                    yield mine, host[there + start - offset : there + stop - offset]
