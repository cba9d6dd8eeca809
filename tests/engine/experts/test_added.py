"""Ranks that join and leave while the node serves: which experts they get, and real processes that come and go."""

from __future__ import annotations

import random
import signal

import pytest

from engine.experts.placing.added import further_copies
from engine.experts.placing.placement import Placement, first_placement
from tests.engine.experts.test_ranks import ranks, saved
from tests.engine.experts.test_remote_ranks import joins, port_of, same

__all__ = ["saved"]


def busiest(placement: Placement, loads: list[float]) -> float:
    """The load of the rank that has most, when the copies of an expert share its load evenly."""
    copies = {expert: len(placement.holders(0, expert)) for expert in range(placement.num_experts)}
    return max(sum(loads[expert] / copies[expert] for expert in slots) for slots in placement.layers[0])


@pytest.mark.parametrize("seed", range(20))
def test_a_further_rank_relieves_the_others(seed):
    rng = random.Random(seed)
    members, experts, least = rng.choice([2, 3, 4]), 12, rng.choice([1, 2])
    placement = first_placement(1, experts, members, least * experts, least, added=2)
    assert placement.members == list(range(members)) and placement.layers[0][members:] == ((), ())
    loads = [rng.uniform(1, 2) ** 4 for _ in range(experts)]
    before = busiest(placement, loads)
    for rank in (members, members + 1):
        slots = further_copies(placement, 0, loads)
        assert len(slots) == placement.slots == len(set(slots))
        placement = placement.with_rank(rank, [slots])
        assert rank in placement.members
        now = busiest(placement, loads)
        assert now < before
        before = now
    assert placement.without(members).members == [*range(members), members + 1]


def test_the_expert_that_all_choose_gets_the_copies():
    placement = first_placement(1, 4, 2, 4, 1, added=1)
    hot = placement.layers[0][1][0]
    assert hot in further_copies(placement, 0, [100.0 if expert == hot else 1.0 for expert in range(4)])


def test_a_rank_joins_and_leaves_while_the_model_computes(saved):
    """Ranks 0 and 1 have one copy of each expert. Rank 2 comes and leaves, comes and is killed, comes and leaves a node
    without work."""
    path = saved("mixtral")
    with ranks(path, max_expert_parallel_size=3) as made:
        assert made.processes.awaited() is None and made.processes.missing() == {}
        same(made, path)
        with joins(port_of(made)) as process:
            made.until(lambda state: state["width"] == 3)
            before = made.group.pairs[2]
            same(made, path)
            assert made.group.pairs[2] > before
            process.send_signal(signal.SIGTERM)
            while process.poll() is None:
                same(made, path)
            assert process.returncode == 0
            assert made.processes.state()["width"] == 2 and made.processes.missing() == {}
            assert made.group.num_masked == 0
            same(made, path)
        with joins(port_of(made), "--model", str(path)) as process:
            made.until(lambda state: state["width"] == 3)
            same(made, path)
            process.kill()
            same(made, path)
            made.until(lambda state: state["width"] == 2)
            assert made.processes.missing() == {} and made.processes.lack() == 0.0
            masked = made.group.num_masked
            assert masked <= 1
        with joins(port_of(made)) as process:
            made.until(lambda state: state["width"] == 3)
            same(made, path)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            same(made, path)
            made.until(lambda state: state["width"] == 2)
            assert made.group.num_masked == masked and made.group.num_dropped == 0
