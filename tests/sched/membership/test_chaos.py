"""Random schedules of every fault at once (scripts/faults.py chaos): invariants after every event, agreement at the
end.

A failing seed is in the test's name and replays exactly: python scripts/faults.py chaos --seeds 1 --start SEED.
"""

from __future__ import annotations

import pytest

from lab.faults.chaos import Broken, Chaos, run_seed
from sched.membership.member import Member
from tests.heavy import seeds


@pytest.mark.parametrize("seed", seeds(15, 50))
def test_the_cluster_agrees_after_any_faults(seed):
    assert run_seed(seed) is None


def test_a_seed_replays_exactly():
    def trace(seed: int) -> str:
        chaos = Chaos(seed, print)
        chaos.record_trace()
        chaos.play()
        return chaos.trace

    assert trace(3) == trace(3) != trace(4)


def test_the_checks_can_fail():
    """A core that is tampered with is caught at its next event."""
    chaos = Chaos(1, print)
    nodes = [chaos.add(f"n{i}", root="aa" * 16) for i in range(2)]
    chaos.join("n1", "n0")
    chaos.run(2.0)
    roster = nodes[0].core.membership._roster
    roster.merge(0.0, Member("ghost", ("10.0.0.9", 1), life=9))
    with pytest.raises(Broken, match="n0 sees other nodes than it was told of"):
        chaos.run(2.0)
