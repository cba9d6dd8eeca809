"""Dispatch: the rows of a round, out to the desks of the ranks and back from their answers (net/rounds/rounds.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engine.experts.plan import Plan
from net.rounds import native
from net.rounds.desk import Desk
from net.rounds.layout import TYPES


class Dispatch:
    """`desks`: of all ranks. `rows` and `pairs`: of each rank in the last round."""

    def __init__(self, plan: Plan, desks: Sequence[Desk]) -> None:
        layout, d = plan.layout, native.Dispatch()
        self.rows, self.pairs = [0] * plan.ranks, [0] * plan.ranks
        self._tokens = [torch.zeros(layout.most_rows, dtype=torch.int32) for _ in desks]
        for rank, (desk, memory) in enumerate(zip(desks, self._tokens, strict=True)):
            d.desks[rank], d.tokens[rank] = desk.message, memory.data_ptr()
        d.hidden, d.top_k, d.columns = layout.hidden, layout.top_k, plan.columns
        d.slots, d.ranks = plan.slots, plan.ranks
        d.at_scales, d.at_pair_rows = layout.at_scales, layout.at_pair_rows
        d.at_pair_slots, d.at_pair_weights = layout.at_pair_slots, layout.at_pair_weights
        d.type, d.coded = TYPES.index(layout.dtype), layout.coded
        # A token's result should not depend on where its experts are: rank 0 codes its own rows too.
        d.own = -1 if layout.coded or plan.shared else 0
        self._d = d

    def replace(self, rank: int, desk: Desk) -> None:
        """The rank has another desk."""
        self._d.desks[rank] = desk.message

    def send(
        self, x: Tensor, chosen: Tensor, weights: Tensor, table: Tensor, counts: Tensor | None, first: int
    ) -> Tensor:
        """Write x [T, H], chosen [T, k] int64 and weights [T, k] to the desks. `table` [experts, columns]: where copies
        are (Placement.table); `first`: the column of the first token. `counts` [experts] int64 grows by the choices.
        Returns the rank of each pair [T, k] int32, -1 without one. The arguments must be contiguous."""
        d, sent = self._d, torch.empty(chosen.shape, dtype=torch.int32)
        d.x, d.chosen, d.weights, d.sent = x.data_ptr(), chosen.data_ptr(), weights.data_ptr(), sent.data_ptr()
        d.table, d.counts = table.data_ptr(), None if counts is None else counts.data_ptr()
        d.num_tokens, d.first = len(x), first
        native.library().mr_dispatch(ctypes.addressof(d))
        self.rows, self.pairs = list(d.rows[: d.ranks]), list(d.pairs[: d.ranks])
        return sent

    def own(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rank 0's rows of the last round, as Work.compute takes them: x and the tokens; None if the rows themselves
        lie on its desk."""
        return None if self._d.own < 0 else (x, self._tokens[0][: self.rows[0]])

    def combine(self, desks: Sequence[Desk], failed: Collection[int], base: Tensor | None, out: Tensor) -> None:
        """The answers of the last round, except of ranks that failed, added to `base` [T, H] float32, into out [T, H],
        which may be `base`."""
        answers = (ctypes.c_void_p * self._d.ranks)(
            *(None if rank in failed else desk.answer for rank, desk in enumerate(desks))
        )
        code = TYPES.index(str(out.dtype).removeprefix("torch."))
        above = None if base is None else base.data_ptr()
        native.library().mr_combine(ctypes.addressof(self._d), answers, above, out.data_ptr(), code)
