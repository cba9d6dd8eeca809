"""A move: experts of one layer change their ranks, between two steps. Which way each of them takes. Pure.

    to a rank of this host     it copies them from the memory of ranks of this host (STAGE), or rank 0 writes them
    to a rank elsewhere        rank 0 sends one with each message (TAKE)

An expert that only ranks elsewhere have comes to rank 0 first (pulling.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from engine.experts.placing.placement import Placement


@dataclass(frozen=True, slots=True)
class Move:
    """`there`: rank of this host and slot; None: only ranks elsewhere have it."""

    layer: int
    copied: dict[int, list[tuple[int, int, int]]]  # by rank: slot, rank there, slot there
    written: list[tuple[int, int, int]]  # rank, slot, expert
    sent: dict[int, list[tuple[int, int, tuple[int, int] | None]]]  # by rank: slot, expert, there
    far: dict[int, list[tuple[int, int]]]  # by expert that only ranks elsewhere have: rank and slot of each copy

    @classmethod
    def between(cls, before: Placement, after: Placement, layer: int, local: int) -> Self:
        """`local`: number of ranks of this host, the first ones."""
        move = cls(layer, {}, [], {}, {})
        for rank, (old, new) in enumerate(zip(before.layers[layer], after.layers[layer], strict=True)):
            for slot, expert in enumerate(new):
                if old[slot] == expert:
                    continue
                holders = before.holders(layer, expert)
                there = next((at for at in holders if at[0] < local), None)
                if there is None:
                    move.far[expert] = holders
                if rank >= local:
                    move.sent.setdefault(rank, []).append((slot, expert, there))
                elif there is None:
                    move.written.append((rank, slot, expert))
                else:
                    move.copied.setdefault(rank, []).append((slot, *there))
        return move

    @property
    def come_to_rank_0(self) -> list[int]:
        """The experts of `far`, once for each place that gets one."""
        sent = [expert for moves in self.sent.values() for _, expert, there in moves if there is None]
        return [*sent, *(expert for _, _, expert in self.written)]

    @property
    def count(self) -> int:
        return len(self.written) + sum(map(len, self.copied.values())) + sum(map(len, self.sent.values()))
