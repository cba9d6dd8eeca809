"""Which experts a rank gets that joins beyond the least number of ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.experts.placing.placement import Placement, Slots


def further_copies(placement: Placement, layer: int, loads: Sequence[float]) -> Slots:
    """The experts of one more rank in this layer: as many as each of the others has, all of them different.

    Greedy: of the rank with the largest load, the expert with the largest load per copy gets one more copy, until the
    slots are used up. `loads`: of all experts, above 0."""
    others = [set(slots) for slots in placement.layers[layer] if slots]
    copies = Counter(expert for slots in others for expert in slots)
    found: set[int] = set()

    def each(expert: int) -> float:
        return loads[expert] / copies[expert]

    for _ in range(placement.slots):
        open_ranks = [slots for slots in others if not slots <= found]
        busiest = max(open_ranks, key=lambda slots: sum(map(each, slots)))
        expert = max(sorted(busiest - found), key=each)
        found.add(expert)
        copies[expert] += 1
    return tuple(sorted(found))
