"""scripts/bench.py connect: its goals, and its programs of mooncake.engine."""

import os
import signal
from itertools import pairwise

import pytest

from lab.bench.common.results import Row
from lab.bench.connect.engine_program import Memcpy, places
from lab.bench.connect.engine_rows import SHAPES, Contenders
from lab.bench.connect.latencies import GOALS, rows, verdicts


def test_goals_are_ratios_of_times():
    assert rows("c", [2e-6, 1e-6, 9e-6], {"up": [], "x": [4e-6]}, {"memcpy": [5e-6]}) == [
        Row("c", "p50", "us", 2.0, {"up": None, "x": 4.0}, {"memcpy": 5.0}),
        Row("c", "p99", "us", 9.0, {"up": None, "x": 4.0}, {"memcpy": 5.0}),
    ]
    found = verdicts(
        [
            Row("write 4K, tcp", "p50", "us", 10.0, {"upstream": 12.0}),
            Row("write 4K, tcp", "p99", "us", 10.0, {"upstream": 12.0}),
            Row("write 4K, one host", "p50", "us", 10.0, {"upstream": 12.0}, {"memcpy": 1.0}),
            Row("read 1M, one host", "p50", "us", 10.0, {"upstream": None}, {"memcpy": 9.5}),
            Row("get 1M, 1 client, shm", "p50", "us", 10.0, {"upstream": 31.0}),
            Row("put 1M, 1 client, tcp", "p50", "us", 10.0, {"upstream": None}),
        ]
    )
    assert [(one["what"], one["ratio"], one["goal"], one["met"]) for one in found] == [
        ("write 4K, tcp: p50 of upstream / ours", 1.2, ">= 1.3", False),
        ("get 1M, 1 client, shm: p50 of upstream / ours", 3.1, ">= 3.0", True),
        ("read 1M, one host: p50 of memcpy / ours", 0.95, ">= 0.9", True),
        ("write 4K, tcp: p99 of upstream / ours", 1.2, ">= 1.0", True),
    ]
    assert len(GOALS) == 4


def test_calls_of_a_round_move_different_bytes_and_join_none():
    mover = Memcpy()
    for size, pieces, count in SHAPES.values():
        calls = places(mover, size, pieces, count)
        rows = [row for call in calls for row in zip(*call, strict=True)]
        assert len(calls) > 2 and all(len(call[0]) == pieces * count for call in calls)
        for side, start in ((0, mover.local), (1, mover.remote)):
            held = sorted((row[side] - start, row[2]) for row in rows)
            assert all(a + n <= b for (a, n), (b, _) in pairwise(held))
            assert held[0][0] >= 0 and sum(held[-1]) <= 64 << 20
        assert not any(a + n == b and c + n == d for (a, c, n), (b, d, _) in pairwise(rows))


@pytest.fixture
def contenders():
    made = Contenders(None)
    yield made
    made.close()


def test_programs_measure_what_they_move_and_start_again(contenders):
    question = {"op": "read", "size": 3000, "pieces": 3, "count": 2, "seconds": 0.0}
    for name in ("tcp", "one host", "memcpy"):
        for op in ("read", "write"):
            took = contenders.measure(name, question | {"op": op})
            assert len(took) == 2 and min(took) > 0.0
    assert contenders.failures == []
    os.kill(contenders.pairs["memcpy"]._client.pid, signal.SIGKILL)
    assert len(contenders.measure("memcpy", question)) == 2, "a peer that has ended is started again"
    assert len(contenders.failures) == 1 and "memcpy" in contenders.failures[0]
    with pytest.raises(RuntimeError):
        contenders.measure("tcp", {"op": "nonsense"})
