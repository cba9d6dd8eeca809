"""Placement: which rank has which experts, in which of its slots. Pure.

A rank has the same number of slots in every layer with experts. An expert may have several copies, on different ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from engine.experts.placing.eplb import apart, rebalanced

Slots = tuple[int, ...]
"""The experts of one rank in one layer, by slot."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`layers[i][rank][slot]`: an expert; i counts only layers with experts. A rank without slots is not there."""

    num_experts: int
    layers: tuple[tuple[Slots, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.layers[0])

    @property
    def slots(self) -> int:
        return len(self.layers[0][0])

    @property
    def members(self) -> list[int]:
        """The ranks that are there."""
        return [rank for rank, slots in enumerate(self.layers[0]) if slots]

    def holders(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """(rank, slot) of every copy."""
        of_layer = self.layers[layer]
        return [(rank, slots.index(expert)) for rank, slots in enumerate(of_layer) if expert in slots]

    def table(self, layer: int, alive: Collection[int], columns: int) -> list[list[int]]:
        """Per expert, columns of rank * slots + slot: its copies on living ranks in turn; -1 without one."""
        rows = []
        for expert in range(self.num_experts):
            there = [rank * self.slots + slot for rank, slot in self.holders(layer, expert) if rank in alive]
            rows.append([there[column % len(there)] if there else -1 for column in range(columns)])
        return rows

    def with_layer(self, layer: int, slots: Sequence[Slots]) -> Placement:
        return replace(self, layers=(*self.layers[:layer], tuple(slots), *self.layers[layer + 1 :]))

    def with_rank(self, rank: int, slots: Sequence[Slots]) -> Placement:
        """`slots`: of this rank, in each layer."""
        changed = ((*of[:rank], new, *of[rank + 1 :]) for of, new in zip(self.layers, slots, strict=True))
        return replace(self, layers=tuple(changed))

    def without(self, rank: int) -> Placement:
        return self.with_rank(rank, [()] * len(self.layers))

    def after(self, layer: int, wanted: Sequence[Sequence[int]]) -> list[Slots]:
        """The slots of a layer when every rank has the experts `wanted`: those that it has already stay where they
        are."""
        result = []
        for before, experts in zip(self.layers[layer], wanted, strict=True):
            missing = [expert for expert in experts if expert not in before]
            result.append(tuple(expert if expert in experts else missing.pop(0) for expert in before))
        return result


def first_placement(
    num_layers: int, num_experts: int, ranks: int, copies: int, least: int, added: int = 0
) -> Placement:
    """Before anything is known about loads: all experts weigh the same. `added`: ranks that may come later."""
    loads = [1.0] * num_experts
    wanted = apart(rebalanced(loads, copies, 1, 1, ranks, least), loads)
    layer = tuple(tuple(sorted(experts)) for experts in wanted)
    return Placement(num_experts, ((*layer, *[()] * added),) * num_layers)


def imbalance(slots: Sequence[Sequence[int]], loads: Sequence[float]) -> float:
    """The load of the busiest rank by the mean load, when the copies of an expert share its load evenly."""
    copies = [0] * len(loads)
    for experts in slots:
        for expert in experts:
            copies[expert] += 1
    by_rank = [sum(loads[expert] / copies[expert] for expert in experts) for experts in slots]
    mean = sum(by_rank) / len(by_rank)
    return max(by_rank) / mean if mean else 1.0
