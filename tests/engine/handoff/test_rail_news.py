"""What a node tells of its rails: a home that is slow counts for those whose blocks it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.handoff.rail_news import MAX_SAMPLED_KEYS, RailNews

KEYS = [bytes([i]) * 16 for i in range(200)]


def news(homes: Any = lambda key: (), **rates: float) -> RailNews:
    return RailNews(cast(Any, SimpleNamespace(bandwidths=lambda: rates)), homes)


def told(one: RailNews, keys: list[bytes]) -> float:
    return one.tell((), keys).fetch_bytes_per_s


def test_times_are_averaged_and_not_rates():
    assert told(news(a=4e9, b=1e9), []) == pytest.approx(1.6e9)
    assert told(news(), KEYS) == 0.0 == news().fetch_s(KEYS, 1000)
    assert news(a=2e9).tell(["a", "b"], []).bytes_per_s == {"a": 2e9}


def test_a_slow_home_slows_the_fetch_of_its_own_blocks_only():
    rates = {"fast": 4e9, "slow": 1e8}
    assert told(news(lambda key: ["fast"], **rates), KEYS) == pytest.approx(4e9)
    slow = news(lambda key: ["slow"], **rates)
    assert told(slow, KEYS) == pytest.approx(1e8)
    assert slow.fetch_s(KEYS, 10**9) == pytest.approx(10.0)
    assert told(news(lambda key: ["slow", "fast"], **rates), KEYS) == pytest.approx(4e9), "the other copy is read"
    half = news(lambda key: ["slow" if key[0] < 100 else "fast"], **rates)
    assert told(half, KEYS) == pytest.approx(2 / (1 / 4e9 + 1 / 1e8), rel=0.2)


def test_homes_are_looked_up_only_where_it_matters_and_of_a_few_keys():
    asked: list[bytes] = []

    def homes(key: bytes) -> list[str]:
        asked.append(key)
        return ["me"]

    even = news(homes, a=4e9, b=3e9)
    assert told(even, KEYS) > 3e9 and not asked
    uneven = news(homes, a=4e9, b=1e9)
    assert told(uneven, KEYS) == told(uneven, []), "blocks of this node itself take no rail"
    assert 0 < len(asked) <= MAX_SAMPLED_KEYS
