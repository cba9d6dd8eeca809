"""Which blocks are rounded: by the measured links to their homes, and by what rounding saves there."""

from __future__ import annotations

import pytest

from cache.block import BlockGeometry
from engine.handoff.rail_news import RailNews
from engine.pooled.chosen_blocks import decode_rate
from engine.pooled.rounding import REFRESH_INTERVAL_S, Rounding

GB = 1e9
RATIO, DECODE = 0.344, 0.9 * GB
HOMES = {b"near": ["near"], b"far": ["far"], b"both": ["near", "far"], b"own": ["self"], b"new": ["new"], b"none": []}


class Links:
    """Bytes of KV per second by peer, and the shares of a lossless coder."""

    def __init__(self, shares: dict[str, float] | None = None, **rates: float) -> None:
        self.rates, self.shares, self.asked = rates, shares or {}, 0

    def bandwidths(self) -> dict[str, float]:
        self.asked += 1
        return dict(self.rates)

    def share(self, peer_id: str) -> float:
        return self.shares.get(peer_id, 1.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rounding(links: Links, clock: Clock | None = None) -> Rounding:
    return Rounding(links, HOMES.__getitem__, RATIO, DECODE, clock or Clock())


def chosen(links: Links) -> set[bytes]:
    rule = rounding(links)
    return {key for key in HOMES if rule.pays(key)}


def test_nothing_is_rounded_before_a_link_was_measured():
    assert chosen(Links()) == set()


def test_a_block_is_rounded_whose_homes_are_all_behind_slow_links():
    """Those of this node's share, and of a home without a measurement, as the mean of the others says."""
    assert chosen(Links(far=0.1 * GB)) == {b"far", b"own", b"new"} | {b"near", b"both"}, "one link stands for all"
    assert chosen(Links(near=10 * GB, far=0.1 * GB)) == {b"far", b"own", b"new"}, "the mean is harmonic"
    assert chosen(Links(near=10 * GB, far=10 * GB)) == set()


def test_the_lossless_coder_may_save_enough():
    assert chosen(Links(far=0.1 * GB)) and not chosen(Links({"far": 0.4}, far=0.1 * GB / 0.4))


def test_it_follows_the_links():
    links, clock = Links(far=10 * GB), Clock()
    rule = rounding(links, clock)
    assert not rule.pays(b"far")
    links.rates["far"] = 0.1 * GB
    assert not rule.pays(b"far") and links.asked == 1
    clock.now += REFRESH_INTERVAL_S
    assert rule.pays(b"far") and links.asked == 2


def test_placement_sees_the_rate_of_exact_kv_that_takes_as_long():
    """As the rates from which prefixes are priced; a hand-over is never rounded."""
    links = Links(near=10 * GB, far=0.1 * GB)
    rule = rounding(links)
    rates = rule.kv_rates(links.rates)
    assert rates["near"] == 10 * GB
    assert 1 / rates["far"] == pytest.approx(RATIO / (0.1 * GB) + 1 / DECODE)
    news = RailNews(links, HOMES.__getitem__, None, rule)  # type: ignore[arg-type]
    assert news.fetch_s([b"far"], 1000) == pytest.approx(1000 / rates["far"])
    assert news.fetch_s([b"near"], 1000) == pytest.approx(1000 / rates["near"])
    assert news.tell(["far"], [b"far"]).bytes_per_s == {"far": 0.1 * GB}
    plain = RailNews(links, HOMES.__getitem__)  # type: ignore[arg-type]
    assert plain.fetch_s([b"far"], 1000) == pytest.approx(1000 / (0.1 * GB))


def test_the_rate_of_decoding_is_measured():
    geometry = BlockGeometry(4, 2, 32, 16, "bfloat16", "int4-auto")
    assert geometry.pool_bytes == geometry.block_bytes > 2 * geometry.int4_bytes
    assert 1e5 < decode_rate(geometry) < 1e12
