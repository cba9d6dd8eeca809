"""When coding pays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.codec.paying import MARGIN, CodecRates, OnWire, worthwhile_ratio

GB = 1e9
rates = st.builds(CodecRates, st.floats(1e6, 1e11), st.floats(1e6, 1e11))
links = st.floats(1e4, 1e11)


def seconds(ratio: float, link: float, coder: CodecRates) -> float:
    """Of one raw byte that is coded, without overlap."""
    return 1 / coder.encode + ratio / link + 1 / coder.decode


@given(links, rates, st.floats(0, 1))
def test_below_the_ratio_a_coded_byte_arrives_sooner(link, coder, ratio):
    if ratio < worthwhile_ratio(link, coder):
        assert seconds(ratio, link, coder) < 1 / link


@given(links, links, rates)
def test_a_slower_link_pays_more(one, other, coder):
    slow, fast = sorted((one, other))
    assert worthwhile_ratio(slow, coder) >= worthwhile_ratio(fast, coder)


def test_examples():
    coder = CodecRates(4 * GB, 4 * GB)
    assert worthwhile_ratio(0.125 * GB, coder) == pytest.approx(1 - 0.125 / 2 - MARGIN)  # 1 Gbit/s
    assert worthwhile_ratio(3.125 * GB, coder) < 0  # 25 Gbit/s
    assert worthwhile_ratio(None, coder) == 0


@given(st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0.1, 1.0), st.booleans())))
def test_means_stay_between_what_was_seen(frames):
    on_wire = OnWire()
    for raw, ratio, coded in frames:
        on_wire.moved(raw, max(1, round(raw * ratio)), coded)
    assert 0 < on_wire.share <= 1 and 0 <= on_wire.coded <= 1


@given(links, rates)
def test_the_link_behind_raw_transfers_is_their_goodput(goodput, coder):
    assert OnWire().link(goodput, coder) == pytest.approx(goodput)


@given(links, st.floats(0.3, 1.0))
def test_the_link_behind_coded_transfers_is_that_of_the_wire(link, ratio):
    coder = CodecRates(3 * link, 5 * link)
    on_wire = OnWire()
    for _ in range(200):
        on_wire.moved(1 << 20, round((1 << 20) * ratio), True)
    goodput = 1 / seconds(ratio, link, coder)
    assert on_wire.link(goodput, coder) == pytest.approx(link, rel=0.01) or ratio * goodput * 4 < 1.01 * link
    assert math.isfinite(on_wire.link(goodput, coder))
