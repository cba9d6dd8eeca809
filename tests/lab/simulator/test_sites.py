"""Simulated sites: the rules of production under virtual time, with 2 to 10 sites."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from lab.loads.sun import Sun, sun
from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.sites.figures import figures
from lab.simulator.sites.rules import SiteRules
from lab.simulator.sites.sites import Sites

EACH = SimConfig(prefill=1, decode=1, cache_blocks=40, pool_blocks=200, step_noise=0.0)
LOAD = Sun(sites=2, common=0.8, rate_s=2.0, day_s=100.0, documents=20, life_s=60.0)
FAST = SiteRules(sites=2, link_gbit_s=400.0, distance_s=0.01)


def document(at_s: float, site: int, blocks: int = 24, own: int = 0) -> TraceRow:
    """The same document for every site, and a block of the request's own."""
    return TraceRow(1000 * at_s, 512 * blocks + 100, 4, [*range(blocks), 10_000 + own], site=site)


def played(rows: list[TraceRow], rules: SiteRules, config: SimConfig = EACH) -> Sites:
    run = Sites(config, rules).played(rows)
    assert all(job.finished > job.arrival for job in run.jobs)
    return run


def test_one_site_is_a_cluster():
    rows = sun(3, 150, replace(LOAD, sites=1))
    run = played(rows, SiteRules(sites=1))
    alone = Cluster(EACH).played(rows)
    assert [job.finished for job in run.jobs] == [job.finished for job in alone.jobs]


@pytest.mark.parametrize("sites", [2, 10])
@pytest.mark.parametrize("kv", ["none", "fetch", "copies"])
def test_every_request_is_answered_and_nothing_is_left(sites, kv):
    rows = sun(1, 120, replace(LOAD, sites=sites))
    run = played(rows, replace(FAST, sites=sites, kv=kv))
    found = figures(run, 10.0, 0.2)
    assert found["finished"] == found["requests"] == 120
    assert (found["link_bytes"] > 0) == (found["from_sites"] > 0)
    assert kv != "none" or not found["link_bytes"]
    assert sum(len(site.jobs) for site in run.sites) == 120
    for site in run.sites:
        assert not site.unfinished
        for budget in site._budgets.values():
            assert budget._booked == pytest.approx(0.0)


def test_kv_crosses_a_fast_link_and_is_recomputed_behind_a_slow_one():
    rows = [document(0.0, 0), document(20.0, 1, own=1)]
    fast, slow = (played(rows, SiteRules(sites=2, moves=False, link_gbit_s=gbit)) for gbit in (400.0, 0.1))
    assert [job.source for job in fast.jobs] == ["none", "site"]
    assert [job.source for job in slow.jobs] == ["none", "none"]
    assert slow.sites[1].far_bytes == 0
    first, second = fast.jobs
    assert second.ttft < first.ttft
    assert second.prefix_tokens == 24 * 512


def test_a_request_moves_to_its_prefix_unless_the_way_is_longer_than_computing_it():
    rows = [document(0.0, 0), document(20.0, 1, own=1)]
    near = played(rows, SiteRules(sites=2, kv="none", distance_s=0.04))
    assert near.moved == 1 and near.jobs[1].source == "local"
    far = played(rows, SiteRules(sites=2, kv="none", distance_s=30.0))
    assert far.moved == 0


def test_a_moved_request_pays_the_round_trip():
    rows = [document(0.0, 0), document(20.0, 1, own=1)]
    short, long = (played(rows, SiteRules(sites=2, kv="none", distance_s=s)).jobs[1] for s in (0.04, 0.24))
    assert long.ttft - short.ttft == pytest.approx(0.2)


def test_what_crosses_twice_is_a_copy_until_its_time_is_over():
    """Nodes have no cache of their own, so every prefix comes from a pool."""
    small = replace(EACH, cache_blocks=0)
    rows = [document(0.0, 0)] + [document(20.0 * i, 1, own=i) for i in (1, 2, 3)] + [document(600.0, 0, own=9)]
    rules = SiteRules(sites=2, moves=False, link_gbit_s=400.0, ttl_s=100.0)
    copies = played(rows, rules, small)
    assert [job.source for job in copies.jobs[:4]] == ["none", "site", "site", "pool"]
    assert copies.sites[1].expired == 24
    assert copies.sites[1].pool.run(range(24)) == 0, "it left the pool"
    once = played(rows, replace(rules, kv="fetch"), small)
    assert [job.source for job in once.jobs[:4]] == ["none", "site", "site", "site"]
    assert once.sites[1].far_bytes > copies.sites[1].far_bytes


def test_at_most_one_look_for_expired_copies_is_due():
    small = replace(EACH, cache_blocks=0, pool_blocks=100)  # some copies are evicted, and return
    run = Sites(small, replace(FAST, moves=False, ttl_s=20.0))
    due, most = 0, 0
    at = run.loop.at

    def counted(time, action, *arguments):
        nonlocal due, most
        if getattr(action, "__name__", "") != "_expire" or action.__self__ is not run.sites[1]:
            at(time, action, *arguments)
            return
        due += 1
        most = max(most, due)

        def look():
            nonlocal due
            due -= 1
            action()

        at(time, look)

    run.loop.at = counted  # type: ignore[method-assign]
    run.played([document(3.0 * i, i % 2, own=i) for i in range(40)] + [document(600.0, 0, own=99)])
    assert most == 1 and run.sites[1].expired


def test_no_window_of_a_link_has_more_bytes_than_its_budget():
    rules = replace(FAST, moves=False, kv="fetch", link_gbit_s=100.0, budget=0.5)
    run = Sites(EACH, rules)
    sent = defaultdict(list)
    send = run.between.send

    def watched(source, target, nbytes, done):
        sent[source].append((run.loop.now, nbytes))
        send(source, target, nbytes, done)

    run.between.send = watched  # type: ignore[method-assign]
    run.played(sun(2, 300, replace(LOAD, rate_s=6.0, common=1.0)))
    assert sum(map(len, sent.values())) > 10
    rate = rules.budget * rules.link_bytes_s
    for link in sent.values():
        for i, (begin, _) in enumerate(link):
            crossed = 0.0
            for at, nbytes in link[i:]:
                crossed += nbytes
                assert crossed <= 0.5 * rate + rate * (at - begin) + 1e3


def test_the_same_seed_gives_the_same_run():
    rows = sun(4, 150, LOAD)
    first, second = (figures(played(rows, FAST), 10.0, 0.2) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"sites": 0}, "needs a site"),
        ({"kv": "all"}, "KV between sites"),
        ({"link_gbit_s": 0.0}, "above 0"),
        ({"ttl_s": -1.0}, "above 0"),
        ({"distance_s": 0.0}, "above 0"),
    ],
)
def test_rules_that_cannot_be_are_refused(wrong, why):
    with pytest.raises(ValueError, match=why):
        SiteRules(**wrong)


@pytest.mark.parametrize("wrong", [{"pool_model": "fast"}, {"ssd_blocks": 10}])
def test_pools_without_homes_are_refused(wrong):
    with pytest.raises(ValueError, match="pool-model real"):
        Sites(replace(EACH, **wrong), FAST)


def test_sites_on_one_machine_slow_each_other_down():
    config = replace(EACH, prefill=0, decode=0, mixed=1)
    apart = replace(FAST, moves=False, kv="none")

    def finished(contention: float, rows: list[TraceRow]) -> list[float]:
        return [job.finished for job in played(rows, apart, replace(config, contention=contention)).jobs]

    first, second = document(0.0, 0, blocks=8), document(0.05, 1, blocks=8)
    alone = finished(0.0, [first])
    assert finished(1.0, [first]) == alone, "the other site computes nothing"
    both = finished(0.0, [first, second])
    assert both[0] == alone[0]
    slow = finished(1.0, [first, second])
    assert slow[0] > both[0] and slow[1] > both[1]
