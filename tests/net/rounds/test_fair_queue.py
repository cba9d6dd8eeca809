"""Whose work is next when several processes ask one, and which nodes it knows: both pure."""

from __future__ import annotations

from collections import Counter

import pytest

from net.rounds.asking_nodes import AskingNodes
from net.rounds.fair_queue import FairQueue


def served(sizes: dict[str, float], until: float) -> Counter[str]:
    """The work done for each, when all ask again at once; until so much is done."""
    queue, done = FairQueue(), Counter[str]()
    for who, work in sizes.items():
        queue.ask(who, work)
    while done.total() < until:
        who = queue.next()
        done[who] += int(sizes[who])
        queue.ask(who, sizes[who])
    return done


@pytest.mark.parametrize("sizes", [{"a": 1, "b": 1}, {"a": 1, "b": 50}, {"a": 3, "b": 50, "c": 7}])
def test_all_get_the_same_share_of_the_work(sizes):
    done = served(sizes, 9000)
    largest = max(sizes.values())
    assert max(done.values()) - min(done.values()) <= 2 * largest


def test_small_work_passes_large_work_that_came_before():
    queue = FairQueue()
    queue.ask("prefill", 1000)
    queue.ask("decode", 1)
    assert queue.next() == "prefill"
    queue.ask("prefill", 1000)
    assert [queue.next() for _ in range(2)] == ["decode", "prefill"]


def test_nobody_saves_up_turns_while_it_has_no_work():
    """b was idle for a long time: from then on, both get the same."""
    queue = FairQueue()
    for _ in range(100):
        queue.ask("a", 1)
        assert queue.next() == "a"
    queue.ask("a", 1)
    order = []
    for _ in range(20):
        queue.ask("b", 1) if "b" not in queue._waiting else queue.ask("a", 1)
        order.append(queue.next())
    counts = Counter(order)
    assert abs(counts["a"] - counts["b"]) <= 2


def test_who_asks_no_more_is_not_next():
    queue = FairQueue()
    queue.ask("a", 5)
    queue.ask("b", 5)
    queue.forget("a")
    assert queue.next() == "b" and len(queue) == 0
    with pytest.raises(ValueError, match="empty"):
        queue.next()


def test_nodes_are_known_from_those_that_are_connected():
    nodes = AskingNodes(["a:1"])
    assert nodes.wanted == {"a:1"}
    nodes.told("a:1", [])
    nodes.told("a:1", ["a:1", "b:1"])
    nodes.told("b:1", ["a:1", "b:1", "c:1"])
    assert nodes.wanted == {"a:1", "b:1", "c:1"}
    nodes.lost("b:1")
    nodes.told("a:1", ["a:1", "c:1"])  # b has died, as gossip says
    assert nodes.wanted == {"a:1", "c:1"}


def test_nodes_are_remembered_while_none_is_connected():
    """A rank whose network is cut finds all nodes again; those that were given at its start, always."""
    nodes = AskingNodes(["a:1"])
    nodes.told("a:1", ["b:1"])
    nodes.told("b:1", ["a:1", "c:1"])
    for node in ("a:1", "b:1"):
        nodes.lost(node)
    assert nodes.wanted == {"a:1", "b:1", "c:1"}
    nodes.told("c:1", ["c:1"])
    assert nodes.wanted == {"a:1", "c:1"}
