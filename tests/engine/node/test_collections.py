"""How often a serving node's garbage collector stops all threads."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import orjson

from engine.start import serve

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
    often, seldom = collections((700, 10, 10)), collections(serve.COLLECT_AFTER)
    assert often.total() > 70 and seldom.total() < 20 and not seldom[2]
