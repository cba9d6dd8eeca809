"""When does a KV CDN pay: the sentence follows from the numbers."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Estimated
from lab.ablations.fleet.sites import (
    COMMON,
    GBIT_S,
    KV,
    LOAD,
    MEAN,
    MOVES,
    SITES_ABLATION,
    cases,
    label,
    pays_from,
    reading,
)

Table = dict[str, dict[str, Estimated]]


def table(better_from: dict[tuple[str, float], float], half: float = 0.01) -> Table:
    """Requests that move wait 1 s on average; KV makes it 0.5 s from these bandwidths on."""
    values: Table = {case.label: {name: Estimated(1.0, half) for name in SITES_ABLATION.metrics} for case in cases(10)}
    for (kv, common), least in better_from.items():
        for gbit_s in GBIT_S:
            if gbit_s >= least:
                values[label(KV[kv], common, gbit_s)][MEAN] = Estimated(0.5, half)
    return values


def test_the_bandwidth_from_which_kv_pays_is_read_off_the_table():
    low, high = COMMON
    values = table({("copies", high): 50.0, ("fetch", high): 100.0, ("copies", low): 200.0})
    assert pays_from(values, MEAN, "copies", high) == 50.0
    assert pays_from(values, MEAN, "fetch", high) == 100.0
    assert pays_from(values, MEAN, "copies", low) == 200.0
    assert pays_from(values, MEAN, "fetch", low) is None
    told = reading(values)
    assert "fetches of KV pay from 100 Gbit/s on, copies pay from 50 Gbit/s on" in told
    assert "fetches of KV are not shown to pay (no difference shown), copies pay from 200 Gbit/s on" in told


def test_a_gain_that_does_not_hold_at_every_higher_bandwidth_is_none():
    values = table({("copies", COMMON[0]): GBIT_S[0]})
    values[label(KV["copies"], COMMON[0], GBIT_S[2])][MEAN] = Estimated(1.0, 0.01)
    assert pays_from(values, MEAN, "copies", COMMON[0]) == GBIT_S[3]


def test_wide_intervals_show_nothing():
    values = table(dict.fromkeys([(kv, common) for kv in KV for common in COMMON], GBIT_S[0]), half=1.0)
    assert pays_from(values, MEAN, "copies", COMMON[0]) is None
    assert "pay from" not in reading(values)


def test_copies_leave_during_a_run_as_they_do_in_life():
    chosen = {case.label: case for case in cases(None)}
    longest = chosen[label(KV["copies"], COMMON[1], GBIT_S[-1])]
    assert longest.rules.ttl_s < longest.requests / LOAD.rate_s / 3
    short = replace(longest, requests=600, rules=replace(longest.rules, ttl_s=longest.rules.ttl_s / 4))
    assert short.simulate(0)["copies_expired"] > 0


def test_a_case_plays_its_load_and_has_every_metric():
    chosen = {case.label: case for case in cases(60)}
    for name in (label(MOVES, COMMON[1]), label(KV["copies"], COMMON[1], GBIT_S[-1])):
        found = chosen[name].simulate(0)
        assert found["finished"] == found["requests"] == 60
        for metric in SITES_ABLATION.metrics.values():
            assert metric(found) >= 0
