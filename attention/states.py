"""States of requests in the blocks of a paged pool: which blocks a step reads and writes, and where a layer's part is.

A request's states are spread over G blocks, one of each group of states; a layer's part is one or more pieces of them.
A step reads the state before its first token and writes the one after its last token, and those at the block borders on
the way that the request keeps. The blocks that it reads and writes may be the same. Tokens of a draft come last and
leave no state, because they may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateBatch:
    """A step's blocks with states; requests in the order of the RaggedBatch, D of which have one token."""

    read: Tensor  # [S, G] int64: the state before the step; without meaning for a request that begins
    fresh: Tensor  # [S] bool: requests that begin, with a state of zeros
    decodes: Tensor  # [D, G] int64: get the state after the token
    chunks: Sequence[Sequence[tuple[int, Tensor]]]  # of each further request, in order: (tokens of this step, blocks
    # [G] int64 that get the state after them); the last one after all of them but its drafts
    drafts: Sequence[int] = ()  # of each of these, tokens behind them that leave no state; empty: none has any


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Where one layer's state lies in the blocks of a request: (part, first element, element behind the last) of each
    piece, in elements of float32."""

    pieces: tuple[tuple[int, int, int], ...]

    def read(self, memory: Tensor, blocks: Tensor) -> Tensor:
        """memory [num_blocks, elements of a block] float32, blocks [N, G] -> a copy [N, elements of the state]."""
        return torch.cat([memory[:, begin:end][blocks[:, part]] for part, begin, end in self.pieces], 1)

    def write(self, memory: Tensor, blocks: Tensor, states: Tensor) -> None:
        """states [N, elements of the state] float32; the blocks of different requests differ."""
        done = 0
        for part, begin, end in self.pieces:
            memory[:, begin:end].index_copy_(0, blocks[:, part], states[:, done : done + end - begin])
            done += end - begin

    def between(self, first: int, last: int) -> StateSlots:
        """Where the elements first .. last - 1 of the state lie."""
        found, done = [], 0
        for part, begin, end in self.pieces:
            low, high = max(first - done, 0), min(last - done, end - begin)
            if low < high:
                found.append((part, begin + low, begin + high))
            done += end - begin
        return StateSlots(tuple(found))

    @property
    def elements(self) -> int:
        """Of a state."""
        return sum(end - begin for _, begin, end in self.pieces)


@dataclass(frozen=True, slots=True)
class Place:
    """Slots in the memory of a pool."""

    memory: Tensor  # [num_blocks, elements of a block] float32
    slots: StateSlots

    def read(self, blocks: Tensor) -> Tensor:
        """See StateSlots."""
        return self.slots.read(self.memory, blocks)

    def write(self, blocks: Tensor, states: Tensor) -> None:
        """See StateSlots."""
        self.slots.write(self.memory, blocks, states)

    @property
    def elements(self) -> int:
        """Of a state."""
        return self.slots.elements

    def apart(self, blocks: Tensor) -> Place:
        """A copy of one state, of blocks [1, G], in memory of its own: its one block is 0."""
        copy = self.read(blocks)
        return Place(copy, StateSlots(((0, 0, copy.shape[1]),)))


def memory_of(pool: Tensor) -> Tensor:
    """The same memory as rows of float32, one for each block: pool [num_blocks, ...] of any float type, contiguous."""
    return pool.view(len(pool), -1).view(torch.float32)
