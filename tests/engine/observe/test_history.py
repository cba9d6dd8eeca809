"""The last minutes of a node and of a cluster, on a virtual clock."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.observe.history import INTERVAL_S, KEPT, MAX_MARKS, History, bin_of, middle_of, number
from engine.observe.merged import SAME_S, merged
from engine.observe.moved import MAX_RAILS, OTHERS, Moved, top
from engine.observe.recent import percentiles

BEGIN = 1_000_000.0


class Node:
    """A history and its virtual clock."""

    def __init__(self, name: str = "a") -> None:
        self.now = BEGIN
        self.history = History(name, self.now)

    def passes(self, seconds: float, rows: Any = (), tiers: Any = None) -> None:
        """The recorder looks once per second."""
        for _ in range(round(seconds)):
            self.now += 1.0
            if self.history.is_over(self.now):
                self.history.close(self.now, rows, tiers or {})

    def since(self, after: int = 0) -> Any:
        """As it arrives at another node."""
        return json.loads(json.dumps(self.history.since(after)))


def row(peer: str = "b", read: int = 0, failures: int = 0, **more: Any) -> dict[str, Any]:
    base = {"peer": peer, "transport": "shm", "bytes_read": read, "bytes_written": 0, "failures": failures, "rails": []}
    return base | more


def rail(name: str, nbytes: int, failures: int = 0, lane: str = "bulk") -> dict[str, Any]:
    return {"rail": name, "lane": lane, "bytes": nbytes, "failures": failures}


def test_an_event_is_counted_in_its_interval_and_in_no_other():
    node = Node()
    node.history.first_token(0.1, 100, 60)
    node.history.next_token(0.02)
    node.history.count("answered")
    node.passes(INTERVAL_S)
    node.history.count("refused")
    node.passes(2 * INTERVAL_S)
    first, second, third = node.since()["intervals"]
    counted = {"prompt_tokens": 100, "found_tokens": 60, "output_tokens": 2, "answered": 1}
    times = {"ttft": {str(bin_of(100)): 1}, "tbt": {str(bin_of(20)): 1}}
    assert first == {"number": number(BEGIN)} | counted | times
    assert second == {"number": number(BEGIN) + 1, "refused": 1}
    assert third == {"number": number(BEGIN) + 2}, "an idle interval costs almost nothing"


def test_the_ring_keeps_fifteen_minutes_and_a_reader_gets_only_what_is_new():
    node = Node()
    node.passes(2 * KEPT * INTERVAL_S)
    numbers = [one["number"] for one in node.since()["intervals"]]
    assert len(numbers) == KEPT and KEPT * INTERVAL_S == 15 * 60
    assert numbers == list(range(number(node.now) - KEPT, number(node.now)))
    assert [one["number"] for one in node.since(numbers[-3])["intervals"]] == numbers[-2:]


def test_a_short_peak_of_the_queue_is_seen():
    node = Node()
    for waiting in (1, 40, 3):
        node.history.load(2, waiting)
    node.passes(INTERVAL_S)
    (only,) = node.since()["intervals"]
    assert (only["running"], only["waiting"]) == (2, 40)


def test_a_paused_process_leaves_a_gap_and_a_clock_that_is_set_back_starts_again():
    node = Node()
    node.passes(10)
    node.now += 100.0  # no interval is made up for this time
    node.passes(5)
    numbers = [one["number"] - number(BEGIN) for one in node.since()["intervals"]]
    assert numbers == [0, 1, 2, 22]
    node.now -= 60.0
    node.passes(10)
    assert [one["number"] - number(BEGIN) for one in node.since()["intervals"]] == [11, 12]


def test_percentiles_of_several_nodes_are_within_a_bin_of_the_exact_ones():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    nodes = [Node("a"), Node("b"), Node("c")]
    times = [rng.lognormvariate(-2, 1.5) for _ in range(500)]
    for seconds in times:
        rng.choice(nodes).history.first_token(seconds, 1, 0)
    for node in nodes:
        node.passes(INTERVAL_S)
    (only,) = merged([node.since() for node in nodes])["intervals"]
    exact = percentiles(1000 * seconds for seconds in times)
    assert exact is not None and only["ttft"]["count"] == len(times)
    for name, ms in exact.items():
        assert only["ttft"][name] == pytest.approx(ms, rel=0.0451)


def test_a_bin_holds_its_middle():
    for at in range(-80, 160):
        assert bin_of(middle_of(at)) == at
    assert bin_of(0.0) == bin_of(1e-9)


def test_intervals_of_nodes_are_added_by_their_numbers():
    one, other = Node("a"), Node("b")
    other.passes(INTERVAL_S)  # it started earlier
    one.now = other.now
    one.history = History("a", one.now)
    for node, found in ((one, 10), (other, 30)):
        node.history.first_token(0.1, 40, found)
        node.history.load(1, found)
        node.passes(INTERVAL_S, tiers={"dram": (found, 100)})
    early, both = merged([one.since(), other.since()])["intervals"]
    assert (early["number"], early["prompt_tokens"]) == (number(BEGIN), 0) and "ttft" not in early
    assert (both["prompt_tokens"], both["found_tokens"], both["waiting"]) == (80, 40, 40)
    assert both["tiers"] == {"dram": [40, 200]} and both["ttft"]["count"] == 2


def test_bytes_are_differences_by_rail():
    moved = Moved("a")
    assert moved.since_last([row(read=100)]) == ({"a – b, shared memory": 100}, {})
    assert moved.since_last([row(read=100)]) == ({}, {})
    assert moved.since_last([row(read=130, failures=2)]) == ({"a – b, shared memory": 30}, {"b": 2})
    rails = [rail("1", 50), rail("2", 20, failures=1), rail("1", 5, lane="urgent")]
    over = row(read=205, failures=2, transport="tcp", rails=rails)
    assert moved.since_last([over]) == ({"a – b, TCP 1": 55, "a – b, TCP 2": 20}, {"b": 1})
    again = row(read=215, failures=2, transport="tcp", rails=[rail("1", 10)])
    assert moved.since_last([again]) == ({"a – b, TCP 1": 10}, {}), "a rail that was opened again counts from 0"


def test_many_rails_are_bounded_and_nothing_is_lost():
    moved, failures = Moved("a").since_last(row(peer=f"p{i}", read=i) for i in range(100))
    assert len(moved) == MAX_RAILS + 1 and moved["a – p99, shared memory"] == 99
    assert sum(moved.values()) == sum(range(100)) and not failures
    assert top({OTHERS: 1000, "x": 1, "y": 2}, 1) == {"y": 2, OTHERS: 1001}


def test_every_node_marks_a_loss_and_it_is_shown_once():
    nodes = [Node("a"), Node("b")]
    for node in nodes:
        node.history.mark(node.now, "fault", "c", "was lost")
        node.now += 3.0
    nodes[1].history.mark(nodes[1].now + 2 * SAME_S, "fault", "c", "was lost")
    marks = merged([node.since() for node in nodes])["marks"]
    assert [mark["unix_s"] for mark in marks] == [BEGIN, nodes[1].now + 2 * SAME_S]


def test_changes_of_role_and_failed_transfers_are_marked():
    node = Node()
    for does in ({"prefill"}, {"prefill"}, {"decode"}, set()):
        node.history.role(node.now, frozenset(does))
    node.passes(INTERVAL_S, [row(failures=3)])
    assert [(mark["kind"], mark["node_id"], mark["text"]) for mark in node.since()["marks"]] == [
        ("role", "a", "takes new requests for decode"),
        ("role", "a", "takes no new requests"),
        ("fault", "b", "transfers from a failed 3 times"),
    ]
    for _ in range(2 * MAX_MARKS):
        node.history.mark(node.now, "fault", "b", "does not answer")
    assert len(node.since()["marks"]) == MAX_MARKS
