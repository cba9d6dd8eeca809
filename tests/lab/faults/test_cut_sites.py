"""The slow link between two sites, and what the scenario reads off its runs."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, ArgumentTypeError
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.sites.budget import BURST_S, LinkBudget
from lab.faults import client, cut_sites
from lab.faults.client import Stream
from lab.faults.cut_sites import budget_rows, load_rows, most_of_budget, served
from lab.faults.networks import namespaces
from lab.faults.networks.linked_sites import LinkedSites
from lab.faults.networks.relay import QUEUE_S, Way
from lab.faults.networks.two_sites import KV, MODES, MOVES, ONE, UNAWARE, TwoSites, add_link_flags, mode_names

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


def test_rows_of_a_load_and_requests_that_were_served_in_the_cut():
    streams = [Stream(begun=1.0, at=[1.5]), Stream(begun=2.0, at=[4.0]), Stream(begun=2.5, error="503: no")]
    rows = {row.metric: row.ours for row in load_rows("sites", streams, (3_000_000, 500_000))}
    assert (rows["requests"], rows["errors"]) == (3.0, 1.0)
    assert rows["first token p50"] == pytest.approx(1.25)
    assert (rows["east to west"], rows["west to east"]) == (3.0, 0.5)
    assert served(streams, 0.5, 2.0) == 1
    assert served(streams, 1.5, 3.0) == 0
    assert served(streams, 0.5, 9.0) == 2


def looks(crossings: list[tuple[float, int]], until_s: float) -> list[tuple[float, float, float]]:
    """What looks each 0.2 s see, if these bytes end to cross at these times."""
    times = [0.2 * i for i in range(1 + round(until_s / 0.2))]
    return [(at, at + 0.01, float(sum(nbytes for end, nbytes in crossings if end <= at))) for at in times]


@given(st.lists(st.floats(0.0, 0.4), min_size=1, max_size=60), st.floats(0.0, BURST_S))
def test_what_a_budget_lets_begin_is_never_more_than_it(pauses, crossing_s):
    budget, now, crossings = LinkBudget(RATE, 1000), 0.0, []
    for pause in pauses:
        now += pause
        while budget.take(now, 100_000):
            crossings.append((now + crossing_s, 100_000))
    assert most_of_budget(looks(crossings, now + 1.0), RATE) <= 1.0


def test_a_link_that_is_used_at_twice_the_budget_for_three_seconds_exceeds_it():
    crossings = [(0.1 * i, round(0.2 * RATE)) for i in range(10, 40)]
    assert most_of_budget(looks(crossings, 5.0), RATE) > 1.0
    assert most_of_budget(looks(crossings, 5.0), 2 * RATE) <= 1.0
    with pytest.raises(ValueError, match="two looks"):
        most_of_budget(looks(crossings, 0.0), RATE)


def test_a_budget_counts_only_if_kv_crossed_and_each_side_has_its_own():
    used = looks([(0.5, 40_000), (1.0, 20_000)], 3.0)
    rows, wrong = budget_rows("sites and KV", {"east": used, "west": looks([], 3.0)}, RATE)
    assert {row.metric: row.ours for row in rows}["KV over the link"] == pytest.approx(0.06)
    assert wrong == []
    _, wrong = budget_rows("sites and KV", {"east": looks([], 3.0), "west": looks([], 3.0)}, RATE)
    assert len(wrong) == 1 and "no KV crossed" in wrong[0]
    assert budget_rows("sites and KV", {"east": looks([], 3.0)}, RATE, pays=False)[1] == []
    rows, wrong = budget_rows("sites and KV", {"east": looks([], 3.0), "west": looks([(1.0, 9_000_000)], 3.0)}, RATE)
    assert len(wrong) == 1 and "came to the west" in wrong[0]
    assert {row.metric: row.ours for row in rows}["most KV in one window"] > 1.0


def sites(*flags: str) -> TwoSites:
    parser = ArgumentParser()
    parser.add_argument("--nodes", default="mixed=4")
    add_link_flags(parser)
    return TwoSites.of(parser.parse_args(flags))


def test_what_the_nodes_of_each_case_know_and_where_they_are():
    two = sites("--mbit-s", "400", "--kv-share", "0.5")
    assert (two.at("east"), two.at("west")) == (["mixed-0", "mixed-1"], ["mixed-2", "mixed-3"])
    bridges = {mode: [two.network(mode)._bridge(name) for name in two.names] for mode in MODES}
    assert bridges == {ONE: ["hub"] * 4} | {mode: ["hub", "hub", "far", "far"] for mode in MODES[1:]}
    limits = {}
    for mode in MODES:
        flags = two.flags(mode)
        limits[mode] = flags[flags.index("--site-link-limit-bytes") + 1]
    assert limits == dict.fromkeys(MODES, "0") | {KV: "25000000"}
    assert two.node_flags(ONE) == two.node_flags(UNAWARE) == {}
    assert two.node_flags(KV) == two.node_flags(MOVES)
    assert [two.node_flags(KV)[name][1] for name in two.names] == ["east", "east", "west", "west"]
    with pytest.raises(ValueError, match="two nodes or more"):
        sites("--nodes", "mixed=1")


def test_a_case_that_does_not_exist_is_refused():
    assert mode_names(",".join(MODES)) == ",".join(MODES)
    with pytest.raises(ArgumentTypeError, match="'site' is none of one site, no sites"):
        mode_names("one site,site")


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["--nodes", "mixed=1"], "two sites need two nodes"),
        (["--nodes", "mixt=2"], "mixt"),
        (["--modes", "sites,one site"], "'one site' has no link; name another one last"),
    ],
)
def test_flags_that_leave_nothing_to_cut_are_refused(capsys, flags, remedy):
    with pytest.raises(SystemExit) as end:
        cut_sites.main(flags)
    assert end.value.code == 2 and remedy in capsys.readouterr().err


def test_requests_go_to_the_nodes_of_their_site_in_turn():
    cluster = {name: SimpleNamespace(url=f"http://{name}") for name in sites().names}
    asked = sites().doors(cluster, [1, 1, 0, 1, 0, 0])
    assert [url[-1] for url in asked] == ["2", "3", "0", "2", "1", "0"]


def test_requests_are_sent_at_their_times_to_their_nodes(monkeypatch):
    sent = []

    async def noted(session, doors, body, request_id, into):
        into.begun = time.monotonic()
        sent.append((doors, body["prompt"], request_id))

    monkeypatch.setattr(client, "stream", noted)
    arrivals = [(0.06, "b"), (0.0, "a"), (0.03, "b")]
    found = asyncio.run(client.each_at(arrivals, [{"prompt": n} for n in range(3)], "load"))
    assert sent == [(["a"], 1, "load-1"), (["b"], 2, "load-2"), (["b"], 0, "load-0")]
    assert found[1].begun + 0.06 <= found[0].begun + 1e-3, "not before its time"


def test_a_healed_node_is_at_its_own_site_again(monkeypatch):
    network, commands = LinkedSites(["a", "b"], ["b"], 20.0, 100.0), []
    monkeypatch.setattr(namespaces, "run_tool", lambda *command: commands.append(command))
    for name, bridge in (("a", "hub"), ("b", "far")):
        network.cut(name, "both")
        network.heal(name)
        assert commands[-1] == ("ip", "link", "set", network._port(name), "master", bridge)


def test_both_sites_are_in_one_network():
    network = LinkedSites(["a", "b"], ["b"], 20.0, 100.0)
    assert network.host("a") == "10.77.0.1" and network.host("b") == "10.77.0.2"
