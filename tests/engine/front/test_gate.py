"""The gate counts requests without a first token, and keeps the first ones."""

from __future__ import annotations

import pytest

from engine.front.gate import ROOM_KEPT_S, Gate
from net.http.common.frontend import Overloaded


def test_the_first_ones_stay_and_places_become_free():
    gate = Gate(lambda: (2, 7.0))
    gate.enter("a")
    gate.enter("b")
    with pytest.raises(Overloaded, match="2 requests already wait") as refused:
        gate.enter("c")
    assert refused.value.retry_after_s == 7.0 and len(gate) == 2
    gate.leave("c")  # it never entered
    gate.leave("a")
    gate.leave("a")
    gate.enter("c")
    assert len(gate) == 2


def test_requests_that_arrive_have_places_too():
    gate = Gate(lambda: (2, 7.0))
    gate.enter("a")
    gate.check(arriving=0)
    with pytest.raises(Overloaded):
        gate.check(arriving=1)


def test_one_request_is_never_refused_here():
    """Without any other, only the nodes know whether they have room."""
    Gate(lambda: (0, 1.0)).enter("a")


def test_the_room_is_asked_for_at_times():
    """A burst of refusals does not ask the nodes' loads each time."""
    now, asked = [5.0], []
    gate = Gate(lambda: (asked.append(now[0]) or 1, 1.0), lambda: now[0])
    gate.enter("a")
    for _ in range(100):
        with pytest.raises(Overloaded):
            gate.check()
    now[0] += ROOM_KEPT_S
    with pytest.raises(Overloaded):
        gate.check()
    assert asked == [5.0, 5.0 + ROOM_KEPT_S]
