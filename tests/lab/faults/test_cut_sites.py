"""The slow link between two sites, and what the scenario reads off its runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.faults.client import Stream
from lab.faults.cut_sites import round_rows, served
from lab.faults.networks.linked_sites import LinkedSites
from lab.faults.networks.relay import QUEUE_S, Way

RATE = 1e6


def test_a_frame_takes_its_bytes_at_the_rate_and_then_the_delay():
    way = Way(0.02, RATE)
    way.offer(10.0, b"x" * 1000)
    way.offer(10.0, b"y" * 1000)
    assert way.next_s(10.0) == pytest.approx(0.021)
    assert way.due(10.0209) == []
    assert way.due(10.0211) == [b"x" * 1000]
    assert way.due(10.0221) == [b"y" * 1000]
    assert way.sent_bytes == 2000
    assert way.next_s(11.0) == 1.0


@given(st.lists(st.tuples(st.floats(0.0, 0.1), st.integers(1, 9000)), min_size=1, max_size=80))
def test_frames_keep_their_order_and_no_window_exceeds_the_rate(frames):
    way, now, arrived = Way(0.01, RATE), 0.0, []
    for pause, nbytes in frames:
        now += pause
        way.offer(now, bytes(nbytes))
        arrived += way.due(now)
        assert way.sent_bytes <= RATE * (now + QUEUE_S) + 9000
    arrived += way.due(now + 10.0)
    assert sum(map(len, arrived)) == way.sent_bytes


def test_a_full_queue_drops_what_comes_behind_it():
    way = Way(0.0, RATE)
    for _ in range(200):
        way.offer(0.0, bytes(1000))
    assert 50_000 <= way.sent_bytes <= 51_000, "50 ms of traffic, and perhaps the frame that fills them"


def test_rows_of_a_round_and_requests_that_were_served_in_the_cut():
    streams = [Stream(begun=1.0, at=[1.5]), Stream(begun=2.0, at=[4.0]), Stream(begun=2.5, error="503: no")]
    rows = {row.metric: row.ours for row in round_rows("sites", streams, (3_000_000, 500_000))}
    assert rows["first token p50"] == pytest.approx(1.25)
    assert (rows["east to west"], rows["west to east"]) == (3.0, 0.5)
    assert served(streams, 0.5, 2.0) == 1
    assert served(streams, 1.5, 3.0) == 0
    assert served(streams, 0.5, 9.0) == 2


def test_both_sites_are_in_one_network():
    network = LinkedSites(["a", "b"], ["b"], 20.0, 100.0)
    assert network.host("a") == "10.77.0.1" and network.host("b") == "10.77.0.2"
