"""Waits against known values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.waiting import erlang_c, waiting


def test_erlang_c_of_one_server_is_its_load_and_of_two_is_known():
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)


def test_one_server_waits_as_m_m_1_does():
    """Exponential service of mean 1: E[S^2] / (2 E[S]) = 1, and those that wait do so for 1 / (1 - load)."""
    share, mean_s = waiting(1, 0.75, 1.0)
    assert share * mean_s == pytest.approx(0.75 / 0.25)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_more_servers_wait_less_and_more_load_waits_more(servers, busy):
    offered = servers * busy
    share, mean_s = waiting(servers, offered, 2.0)
    assert 0 <= share <= 1
    more = waiting(servers + 1, offered, 2.0)
    assert more[0] <= share and more[1] < mean_s
    less = waiting(servers, 0.9 * offered, 2.0)
    assert less[0] <= share and less[1] < mean_s
