"""Loads of sites that follow the sun: shifted waves, and documents that some or all sites read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from lab.loads.sun import Sun, sun
from lab.loads.trace import read_trace, write_trace

LOAD = Sun(sites=3, rate_s=20.0, day_s=120.0, depth=0.9, documents=30, life_s=60.0)


def test_each_site_is_busy_at_its_own_time_of_the_day():
    rows = sun(1, 4800, LOAD)
    for site in range(3):
        peak = site * LOAD.day_s / 3
        near, opposite = 0, 0
        for row in rows:
            if row.site == site:
                phase = (row.timestamp_ms / 1000 - peak) % LOAD.day_s / LOAD.day_s
                near += phase < 0.125 or phase > 0.875
                opposite += 0.375 < phase < 0.625
        assert near > 4 * opposite, (site, near, opposite)
    mean_s = rows[-1].timestamp_ms / 1000 / len(rows)
    assert 0.8 < mean_s * LOAD.rate_s < 1.25


def readers(common: float) -> Counter[int]:
    """The number of documents by the number of sites that read them."""
    sites: dict[int, set[int]] = {}
    for row in sun(2, 3000, replace(LOAD, common=common)):
        sites.setdefault(row.hash_ids[0], set()).add(row.site)
    return Counter(len(read) for read in sites.values())


def test_common_documents_are_read_at_all_sites_and_others_at_one():
    assert set(readers(0.0)) == {1}
    assert readers(1.0)[3] > readers(1.0)[1]
    some = readers(0.5)
    assert some[1] > 0 and some[3] > 0


def test_documents_pass():
    rows = sun(3, 3000, LOAD)
    early = {row.hash_ids[0] for row in rows if row.timestamp_ms < 20_000}
    late = {row.hash_ids[0] for row in rows if row.timestamp_ms > 100_000}
    assert early and late and not early & late, "a document lives for 60 s"


def test_the_site_of_a_row_survives_a_file(tmp_path: Path):
    rows = sun(4, 60, LOAD)
    path = tmp_path / "sun.jsonl"
    write_trace(path, rows)
    assert list(read_trace(path)) == rows
    assert any(row.site for row in rows)
