"""Which way experts take when they change their ranks."""

from __future__ import annotations

import random

import pytest

from engine.experts.placing.moves import Move
from engine.experts.placing.placement import Placement


def test_experts_come_from_memory_here_if_a_rank_here_has_them():
    """Ranks 0 and 1 are here, 2 and 3 elsewhere."""
    before = Placement(6, (((0, 1), (1, 2), (3, 4), (5, 0)),))
    after = Placement(6, (((0, 2), (1, 3), (3, 2), (4, 0)),))
    move = Move.between(before, after, 0, 2)
    assert move.copied == {0: [(1, 1, 1)]}
    assert move.written == [(1, 1, 3)]
    assert move.sent == {2: [(1, 2, (1, 1))], 3: [(0, 4, None)]}
    assert move.far == {3: [(2, 0)], 4: [(2, 1)]} and sorted(move.come_to_rank_0) == [3, 4] and move.count == 4
    assert Move.between(before, before, 0, 2).count == 0


@pytest.mark.parametrize("seed", range(10))
def test_every_place_that_changes_is_filled_once(seed):
    rng = random.Random(seed)
    before, after = (Placement(8, (tuple(tuple(rng.sample(range(8), 4)) for _ in range(4)),)) for _ in range(2))
    local = rng.randrange(1, 5)
    move = Move.between(before, after, 0, local)
    filled = {(rank, slot): expert for rank, slot, expert in move.written}
    for rank, copies in move.copied.items():
        assert rank < local
        for slot, there, other in copies:
            assert there < local
            filled[rank, slot] = before.layers[0][there][other]
    for rank, sent in move.sent.items():
        assert rank >= local
        for slot, expert, at in sent:
            assert at is None or (at[0] < local and before.layers[0][at[0]][at[1]] == expert)
            filled[rank, slot] = expert
    for expert, copies in move.far.items():
        assert copies == before.holders(0, expert) and all(rank >= local for rank, _ in copies)
    assert set(move.come_to_rank_0) == set(move.far)
    places = [(rank, slot) for rank in range(4) for slot in range(4)]
    old, new = ({(rank, slot): one.layers[0][rank][slot] for rank, slot in places} for one in (before, after))
    assert filled == {place: new[place] for place in places if old[place] != new[place]}
    assert move.count == len(filled)
