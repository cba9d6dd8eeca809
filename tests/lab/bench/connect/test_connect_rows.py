"""scripts/bench.py connect: its goals, and its programs of mooncake.engine."""

import os
import signal
from itertools import pairwise

import pytest

from lab.bench.common.results import Row
from lab.bench.connect.command import keep
from lab.bench.connect.engine_program import Memcpy, places
from lab.bench.connect.engine_rows import SHAPES, Contenders
from lab.bench.connect.latencies import GOALS, in_turns, rows, verdicts
from lab.bench.connect.store_rows import Clients, measured


def test_goals_are_ratios_of_times():
    assert rows("c", [2e-6, 1e-6, 9e-6], {"up": [], "x": [4e-6]}, {"memcpy": [5e-6]}) == [
        Row("c", "p50", "us", 2.0, {"up": None, "x": 4.0}, {"memcpy": 5.0}, samples={"ours": 3, "x": 1, "memcpy": 1}),
        Row("c", "p99", "us", 9.0, {"up": None, "x": 4.0}, {"memcpy": 5.0}, samples={"ours": 3, "x": 1, "memcpy": 1}),
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


def test_a_limit_that_failed_is_left_out():
    assert [row.limits for row in rows("c", [1e-6], {}, {"memcpy": []})] == [{}, {}]


def test_contenders_take_turns_and_one_that_lacks_a_round_has_no_value():
    asked = []

    def measure(name):
        asked.append(name)
        return [] if (name, len(asked)) == ("b", 4) else [1.0]

    assert in_turns(("a", "b", "c"), 3, measure) == {"a": [1.0] * 3, "b": [], "c": [1.0] * 3}
    assert "".join(asked) == "abcbcacab"


class Peer(Clients):
    """Fails as often as it is said to. `opened`: how many servers it has started."""

    def __init__(self, fails):
        super().__init__("python", {}, self.serve)
        self.fails, self.opened, self.closed = fails, 0, 0

    def serve(self, stack):
        self.opened += 1
        stack.callback(self.ends)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("its master ended")
        return "address"

    def ends(self):
        self.closed += 1

    def _measured(self, count, question):
        super()._measured(0, question)
        return [1.0]


def test_a_peer_of_the_store_is_started_again_and_ours_must_not_fail():
    failures, question = [], {"op": "put", "size": 4096}
    peer = Peer(fails=1)
    assert measured({"upstream": peer}, 1, question, failures, "upstream") == [1.0]
    assert (peer.opened, peer.closed) == (2, 1) and failures == ["upstream, put of 4096 bytes: its master ended"]
    assert measured({"upstream": Peer(fails=2)}, 1, question, failures, "upstream") == [] and len(failures) == 3
    with pytest.raises(RuntimeError, match="its master ended"):
        measured({"shm": Peer(fails=1)}, 1, question, failures, "shm")


def test_rows_before_a_failure_are_kept():
    def cells():
        yield Row("c", "p50", "us", 1.0)
        raise RuntimeError("a program ended with 1")

    kept = []
    assert keep(kept, cells()) == "a program ended with 1" and [row.case for row in kept] == ["c"]


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
    made = Contenders(None, [])
    yield made
    made.close()


def test_programs_measure_what_they_move_and_start_again(contenders):
    question = {"op": "read", "size": 3000, "pieces": 3, "count": 2, "seconds": 0.0}
    for name in ("tcp", "one host", "memcpy"):
        for op in ("read", "write"):
            took = contenders.measure(question | {"op": op}, name)
            assert len(took) == 2 and min(took) > 0.0
    assert contenders.failures == []
    os.kill(contenders.pairs["memcpy"]._client.pid, signal.SIGKILL)
    assert len(contenders.measure(question, "memcpy")) == 2, "a peer that has ended is started again"
    assert len(contenders.failures) == 1 and "memcpy" in contenders.failures[0]
    with pytest.raises(RuntimeError):
        contenders.measure({"op": "nonsense"}, "tcp")
