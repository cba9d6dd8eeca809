"""Survivors agree, in any order of losses and messages, on a virtual network."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.collectives.membership import Decision, Membership, Removed, Report


class Net:
    """Ranks that report whenever their view changes; messages between two ranks keep their order. A rank that is lost
    by its process's end is noticed by each of the others at some time, after its last messages."""

    def __init__(self, seed: int, size: int) -> None:
        self.chance = random.Random(seed)
        self.ranks = {rank: Membership(rank, 0, tuple(range(size))) for rank in range(size)}
        self.decisions: dict[int, Decision] = {}
        self.wires: dict[tuple[int, int], list[Report | None]] = {}  # None: the end of the stream
        self.dead: set[int] = set()

    def report(self, rank: int) -> None:
        for other in self.ranks:
            if other != rank:
                self.wires.setdefault((rank, other), []).append(self.ranks[rank].report(7))

    def die(self, rank: int) -> None:
        """Some of the last messages may not have left."""
        self.dead.add(rank)
        for other in self.ranks:
            if other != rank:
                wire = self.wires.setdefault((rank, other), [])
                del wire[self.chance.randint(0, len(wire)) :]
                wire.append(None)

    def step(self) -> bool:
        ready = [pair for pair, wire in self.wires.items() if wire and pair[1] not in self.dead]
        if not ready:
            return False
        source, target = self.chance.choice(ready)
        message, me = self.wires[source, target].pop(0), self.ranks[target]
        before = set(me.gone)
        if message is None:
            me.lose([source])
        else:
            me.hear(source, message)
        if me.gone != before:
            self.report(target)
        decision = me.decide(7)
        if decision is not None:
            self.decisions[target] = decision
            self.ranks[target] = Membership(target, decision.epoch, decision.members)
            for rank in self.dead:  # the connection has ended already
                if (rank, target) in self.wires and not self.wires[rank, target]:
                    self.ranks[target].lose([rank])
            self.report(target)
        return True


@given(st.integers(0, 1 << 30), st.integers(2, 6), st.data())
def test_all_survivors_end_in_the_same_epoch(seed, size, data):
    net = Net(seed, size)
    dying = data.draw(st.lists(st.integers(0, size - 1), unique=True, min_size=1, max_size=size - 1))
    pauses = data.draw(st.lists(st.integers(0, 30), min_size=len(dying), max_size=len(dying)))
    for rank, pause in zip(dying, pauses, strict=True):
        net.die(rank)
        for _ in range(pause):
            net.step()
    for _ in range(10_000):
        if not net.step():
            break
    alive = set(range(size)) - net.dead
    for rank in alive:
        assert set(net.decisions[rank].members) >= alive and net.decisions[rank].agreed
        assert net.ranks[rank].members == tuple(sorted(alive))
    assert len({net.ranks[rank].epoch for rank in alive}) == 1


def test_a_removed_rank_learns_it_even_if_it_believes_the_others_gone():
    late = Membership(2, 0, (0, 1, 2))
    late.lose([0, 1])
    with pytest.raises(Removed):
        late.hear(0, Report(1, [0, 1], [], 3))


def test_different_calls_are_not_agreed():
    one = Membership(0, 0, (0, 1, 2))
    one.lose([2])
    assert one.decide(4) is None and one.silent() == [1]
    one.hear(1, Report(0, [0, 1, 2], [2], 5))
    assert one.decide(4) == Decision(1, (0, 1), 5, agreed=False)
