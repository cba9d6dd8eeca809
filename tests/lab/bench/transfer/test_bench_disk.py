"""scripts/bench.py store --disk: the tier's rows, and fio's jobs with the same work."""

import shutil

import pytest

from cache.ssd import backends
from lab.bench.common.results import Row
from lab.bench.transfer.disk import BLOCK, NextToFio, goals, jobs
from lab.bench.transfer.fio import INSTALL, FioError, Job, fio_speed, moved

BLOCKS = 8
here = pytest.mark.skipif(shutil.which("fio") is None, reason=INSTALL)


@pytest.mark.parametrize("backend", backends)
def test_without_fio_the_rows_say_how_to_get_it(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    medium = NextToFio(tmp_path, BLOCKS, backend)
    medium.measure(0)
    rows = medium.rows()
    assert [row.case for row in rows] == [f"{backend}, {name}" for name in jobs(backend, BLOCKS)]
    assert all(row.ours and row.ours > 0 for row in rows)
    assert all(row.peers == {"fio": None} and "apt-get install fio" in row.note for row in rows)
    assert goals(rows) == []
    assert list(tmp_path.iterdir()) == []


@here
@pytest.mark.parametrize("backend", backends)
def test_every_row_stands_next_to_fio(backend, tmp_path):
    medium = NextToFio(tmp_path, BLOCKS, backend)
    medium.measure(0)
    medium.measure(1)
    assert medium.missing == ""
    assert all(row.peers["fio"] and row.peers["fio"] > 0 and not row.note for row in medium.rows())
    assert len(goals(medium.rows())) == 3
    assert list(tmp_path.iterdir()) == []


@here
def test_a_second_write_goes_over_the_same_file(tmp_path):
    path = tmp_path / "file"
    job = Job("write", 4, BLOCK)
    fio_speed(path, job)
    before = path.stat()
    fio_speed(path, job)
    assert path.stat().st_ino == before.st_ino
    assert before.st_size == 4 * BLOCK <= before.st_blocks * 512


@here
def test_a_failure_of_fio_is_told_in_its_words(tmp_path):
    (tmp_path / "plain").touch()
    with pytest.raises(FioError, match=r"fio failed: .*Not a directory"):
        fio_speed(tmp_path / "plain" / "file", Job("write", 4, BLOCK))


def test_fio_takes_the_way_of_the_medium_and_syncs_as_it_does(tmp_path):
    flags = {backend: {row: job.flags(tmp_path) for row, job in jobs(backend, BLOCKS).items()} for backend in backends}
    for backend, direct in (("lmdb", "--direct=0"), ("file", "--direct=1")):
        for row in ("put", "put_recycled", "put_synced"):
            assert direct in flags[backend][row]
        assert "--end_fsync=1" in flags[backend]["put"]
        assert "--fdatasync=1" in flags[backend]["put_synced"]
        for row in ("get_cold", "get_cold_2_threads"):
            assert {"--direct=1", "--invalidate=1"} <= set(flags[backend][row])
    assert "--sync_file_range=write:8" in flags["lmdb"]["put"]
    assert {"--direct=0", "--invalidate=0", "--pre_read=1", "--loops=16"} <= set(flags["lmdb"]["get_hot"])
    assert {"--numjobs=2", f"--size={BLOCKS // 2 * BLOCK}"} <= set(flags["file"]["get_cold_2_threads"])


def test_the_speed_is_that_of_the_whole_job():
    told = {"jobs": [{"write": {"io_bytes": 4 * BLOCK, "runtime": 2}}]}
    assert moved(told, Job("write", 4, BLOCK)) == pytest.approx(4 * BLOCK / 2e-3 / 1e9)
    with pytest.raises(FioError, match="instead of"):
        moved(told, Job("write", 8, BLOCK))
    told = {"jobs": [{"read": {"io_bytes": 64 * BLOCK, "runtime": 32}}]}  # each block 16 times: one time is too short
    assert moved(told, Job("read", 4, BLOCK, cached=True, resident=True)) == pytest.approx(64 * BLOCK / 32e-3 / 1e9)
    told["jobs"][0]["read"]["runtime"] = 0
    with pytest.raises(FioError, match="less than the millisecond"):
        moved(told, Job("read", 4, BLOCK, cached=True, resident=True))


def test_goals_are_ratios_of_one_row():
    rows = [
        Row("lmdb, put", "speed", "GB/s", 1.0, {"fio": 2.0}),
        Row("lmdb, get_cold", "speed", "GB/s", 1.0, {"fio": 2.0}),
        Row("lmdb, get_hot", "speed", "GB/s", 1.0, {"fio": 2.0}),
        Row("file, put", "speed", "GB/s", 1.0, {"fio": None}),
    ]
    assert [(row["what"], row["ratio"], row["goal"], row["met"]) for row in goals(rows)] == [
        ("lmdb, put: GB/s of ours / fio", 0.5, ">= 0.5", True),
        ("lmdb, get_cold: GB/s of ours / fio", 0.5, ">= 0.8", False),
    ]
