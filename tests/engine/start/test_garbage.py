"""How often a serving node's garbage collector stops all threads, and that what a lost node leaves goes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from engine.start import garbage
from engine.start.garbage import COLLECT_AFTER, collect_seldom

MESSAGES = orjson.dumps([{"role": "user", "content": "a"}] * 60_000)


def collections(thresholds: tuple[int, int, int]) -> Counter[int]:
    """By generation, while the largest body is parsed."""
    counted: Counter[int] = Counter()
    before = gc.get_threshold()

    def count(phase: str, info: dict[str, Any]) -> None:
        counted[info["generation"]] += phase == "start"

    gc.collect()
    gc.callbacks.append(count)
    gc.set_threshold(*thresholds)
    try:
        messages = orjson.loads(MESSAGES)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(count)
    assert len(messages) == 60_000
    return counted


def test_the_largest_body_is_parsed_with_few_collections():
    often, seldom = collections((700, 10, 10)), collections(COLLECT_AFTER)
    assert often.total() > 70 and seldom.total() < 20 and not seldom[2]


class Connection:
    """To a lost node."""

    def __init__(self) -> None:
        self.transport = SimpleNamespace(protocol=self)


@pytest.fixture
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


async def test_cycles_of_lost_nodes_go_in_one_collection_for_all_of_them(monkeypatch, as_before):
    monkeypatch.setattr(garbage, "LOST_S", 0.05)
    lost: list[Callable[[Any, str], None]] = []
    collect_seldom(SimpleNamespace(on_down=lost.append))
    connections = [Connection() for _ in range(3)]
    left, full = [weakref.ref(one) for one in connections], gc.get_stats()[2]["collections"]
    for _ in range(3):
        lost[0](None, "dead")
    connections.clear()
    assert all(one() for one in left), "cycles"
    async with asyncio.timeout(5):
        while any(one() for one in left):  # noqa: ASYNC110 - a timer
            await asyncio.sleep(0.01)
    assert gc.get_stats()[2]["collections"] == full + 1
    connections.append(Connection())
    again = weakref.ref(connections.pop())
    lost[0](None, "left")
    async with asyncio.timeout(5):
        while again():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
