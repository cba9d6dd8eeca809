"""Rates and goals of scripts/bench.py collectives."""

from lab.bench.collectives.command import missed, row


def test_a_rate_is_the_bytes_of_a_call_by_its_median_time():
    made = row(2, "all_reduce", 4000, {"ours": [1e-6, 2e-6, 9e-6], "gloo": [4e-6], "memcpy": [1e-6]})
    assert (made.case, made.metric, made.unit) == ("ranks=2 bytes=4000", "all_reduce", "GB/s")
    assert (made.ours, made.peers, made.limits) == (2.0, {"gloo": 1.0}, {"memcpy": 4.0})
    barrier = row(4, "barrier", 0, {"ours": [1e-5], "gloo": [1e-4]})
    assert (barrier.unit, barrier.ours, barrier.limits) == ("1000/s", 100.0, {})


def test_goals_are_for_all_reduce_and_all_to_all():
    def times(ours):
        return {"ours": [ours], "gloo": [1.0], "memcpy": [0.1]}

    rows = [
        row(2, name, 1000, times(ours)) for name in ("all_reduce", "all_to_all", "broadcast") for ours in (0.7, 1.1)
    ]
    assert [(one.metric, one.ours) for one in missed(rows)] == [
        ("all_reduce", rows[1].ours),
        ("all_to_all", rows[2].ours),
        ("all_to_all", rows[3].ours),
    ]
