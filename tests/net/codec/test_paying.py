"""When coding pays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.codec.paying import MARGIN, ROUNDING_GAIN, CodecRates, OnWire, rounding_pays, worthwhile_ratio

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


shares, decoders = st.floats(0.3, 1.0), st.floats(1e6, 1e11)


@given(links, shares, st.floats(0, 1), decoders)
def test_rounded_kv_that_pays_comes_a_quarter_sooner(goodput, share, ratio, decode):
    exact_s, rounded_s = 1 / goodput, ratio / (goodput * share) + 1 / decode
    assert rounding_pays(goodput, share, ratio, decode) == (rounded_s <= (1 - ROUNDING_GAIN) * exact_s)


@given(links, links, shares, st.floats(0, 1), decoders)
def test_rounding_that_pays_on_a_link_pays_on_a_slower_one(one, other, share, ratio, decode):
    slow, fast = sorted((one, other))
    assert rounding_pays(slow, share, ratio, decode) or not rounding_pays(fast, share, ratio, decode)


def test_examples_of_rounding():
    """bfloat16 in four bits with the bounds of groups: 0.344 of its bytes; decoded at 0.9 GB/s by a thread."""
    assert rounding_pays(0.125 * GB, 1.0, 0.344, 0.9 * GB)  # 1 Gbit/s
    assert rounding_pays(0.125 * GB / 0.72, 0.72, 0.344, 0.9 * GB), "also where exact KV is coded without loss"
    assert not rounding_pays(1.25 * GB, 1.0, 0.344, 0.9 * GB)  # 10 Gbit/s
    assert not rounding_pays(1e3, 0.4, 0.344, 0.9 * GB), "zeros, which the lossless coder makes as short"
