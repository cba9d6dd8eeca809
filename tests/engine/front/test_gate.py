"""The gate counts requests without a first token, and keeps the first ones."""

from __future__ import annotations

import pytest

from engine.front.gate import Gate
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
