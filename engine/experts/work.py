"""The work of a message: products of experts, or an expert from another rank.

COMPUTE  layer, rows, pairs    answer[row] = sum over the row's pairs of  weight * expert(slot, x[row]), in float32
STAGE    layer, moves          read experts from other ranks: (slot, rank, slot there) of each, in the rows' place
TAKE     layer, 0, 0, slot, expert, whether it is the first of a move, checksum: the expert came with the message
COMMIT                         use them
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.experts.share import Share
from net.rounds import native
from net.rounds.desk import Desk
from net.rounds.layout import PAGE, TYPES

COMPUTE, STAGE, COMMIT, TAKE = 0, 1, 2, 3
MOST_PAIRS = 4096
"""Rows of one grouped product: those of a long prompt are not copied all at once."""


class Work:
    """What one rank does with the messages on its desk. `shares`: of the ranks of its host, its own among them."""

    def __init__(self, desk: Desk, rank: int, shares: Mapping[int, Share]) -> None:
        layout = desk.layout
        self._desk, self._share, self._shares = desk, shares[rank], shares
        memory, self._dtype = desk.region.memory, getattr(torch, layout.dtype)
        shape, pairs = (layout.most_rows, layout.hidden), layout.most_rows * layout.top_k

        def part(at: int, count: int, dtype: torch.dtype) -> Tensor:
            return torch.frombuffer(memory, dtype=dtype, count=count, offset=PAGE + at)

        count = layout.most_rows * layout.hidden
        self._rows = None if layout.coded else part(0, count, self._dtype).view(shape)
        self._moves = part(0, 3 * self.most_moves, torch.int64).view(-1, 3)
        self._pair_rows = part(layout.at_pair_rows, pairs, torch.int32)
        self._pair_slots = part(layout.at_pair_slots, pairs, torch.int32)
        self._pair_weights = part(layout.at_pair_weights, pairs, torch.float32)
        self._answer = part(layout.message_bytes, count, self._dtype).view(shape)

    @property
    def most_moves(self) -> int:
        """Moves that one message has room for."""
        return self._desk.layout.message_bytes // 24

    def do(self, head: list[int]) -> None:
        kind, layer, first, second = head[:4]
        if kind == COMPUTE:
            self.compute(layer, first, second)
        elif kind == STAGE:
            self.stage(layer, first)
        elif kind == COMMIT:
            self._share.commit()

    def compute(self, layer: int, rows: int, pairs: int, given: tuple[Tensor, Tensor] | None = None) -> None:
        """`given`: x [T, H] and the token of each row [rows], in place of rows in the message."""
        x, tokens = (self._x(rows), None) if given is None else given
        slots = self._pair_slots[:pairs]
        order = slots.argsort(stable=True)
        ends = slots.bincount(minlength=self._share.slots).cumsum(0)
        of_row = self._pair_rows[:pairs][order]
        weight = self._pair_weights[:pairs][order, None]
        total = torch.zeros(rows, self._desk.layout.hidden)
        for begin in range(0, pairs, MOST_PAIRS):
            part = slice(begin, min(begin + MOST_PAIRS, pairs))
            chosen = of_row[part]
            given_rows = x[chosen if tokens is None else tokens[chosen]]
            of_part = (ends - begin).clamp(0, len(chosen)).to(torch.int32)
            out = self._share.experts(layer, given_rows, of_part)
            total.index_add_(0, chosen, out.float() * weight[part])
        self._answer[:rows].copy_(total)

    def put_moves(self, moves: list[tuple[int, int, int]]) -> None:
        """Write (slot, rank, slot there) of each into the message."""
        if moves:
            self._moves[: len(moves)].copy_(torch.tensor(moves))

    def stage(self, layer: int, count: int) -> None:
        self._share.drop_staged()
        for slot, rank, there in self._moves[:count].tolist():
            self._share.stage(layer, slot, self._shares[rank], there)

    def _x(self, rows: int) -> Tensor:
        if self._rows is not None:
            return self._rows[:rows]
        layout = self._desk.layout
        x = torch.empty(rows, layout.hidden, dtype=self._dtype)
        message, kinds = self._desk.message, (TYPES.index(layout.dtype), layout.coded)
        native.library().mr_decode(message, message + layout.at_scales, x.data_ptr(), rows, layout.hidden, *kinds)
        return x
