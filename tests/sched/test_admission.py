from __future__ import annotations

from sched.admission import Limits, retry_after_s


def test_a_queue_is_full_at_its_bound():
    limits = Limits(max_waiting=2)
    assert [limits.full(waiting) for waiting in (0, 1, 2, 3)] == [False, False, True, True]


def test_objectives_are_checked_only_where_given():
    assert Limits().missed(1e6, 1e6) is None
    assert "first token 2.00 s, the objective is 1.00 s" in Limits(ttft_slo_s=1.0).missed(2.0, 0.0)
    assert "per token" in Limits(ttft_slo_s=1.0, tpot_slo_s=0.1).missed(0.5, 0.2)


def test_retry_after_is_the_time_until_the_first_queue_moves_on():
    assert retry_after_s([(10, 25.0), (1, 9.0)]) == 3.0


def test_retry_after_is_bounded_and_whole():
    assert retry_after_s([]) == 1.0
    assert retry_after_s([(10, 0.1)]) == 1.0
    assert retry_after_s([(1, 1e6)]) == 60.0
