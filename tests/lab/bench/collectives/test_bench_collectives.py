"""Rates and goals of scripts/bench.py collectives."""

import json

import pytest

from lab.bench.collectives import command
from lab.bench.collectives.command import missed, row


def test_a_rate_is_the_bytes_of_a_call_by_its_median_time():
    made = row(2, "all_reduce", 4000, {"ours": [1e-6, 2e-6, 9e-6], "gloo": [4e-6], "memcpy": [1e-6]})
    assert (made.case, made.metric, made.unit) == ("ranks=2 bytes=4000", "all_reduce", "GB/s")
    assert (made.ours, made.peers, made.limits) == (2.0, {"gloo": 1.0}, {"memcpy": 4.0})
    barrier = row(4, "barrier", 0, {"ours": [1e-5], "gloo": [1e-4]})
    assert (barrier.unit, barrier.ours, barrier.limits) == ("1000/s", 100.0, {})


def test_goals_are_for_all_reduce_and_all_to_all():
    def times(ours):
        return {"ours": [ours], "gloo": [1.0], "memcpy": [0.1]}

    rows = [
        row(2, name, 1000, times(ours)) for name in ("all_reduce", "all_to_all", "broadcast") for ours in (0.7, 1.1)
    ]
    assert [(one.metric, one.ours) for one in missed(rows)] == [
        ("all_reduce", rows[1].ours),
        ("all_to_all", rows[2].ours),
        ("all_to_all", rows[3].ours),
    ]


def test_sizes_that_ranks_cannot_divide_are_refused(capsys):
    """They would move fewer bytes than the rate says."""
    with pytest.raises(SystemExit) as end:
        command.main(["--ranks", "3", "--sizes", "4096"])
    assert end.value.code == 2 and "--sizes 4096: 3 ranks" in capsys.readouterr().err


def test_what_was_measured_before_ranks_fail_is_kept(tmp_path, monkeypatch, capsys):
    def measure(ranks, sizes, rounds):
        if ranks == 4:
            raise RuntimeError("ranks [3] failed")
        return [["broadcast", 4096, {"ours": [1e-6], "gloo": [1e-6]}]]

    monkeypatch.setattr(command, "measure", measure)
    out = tmp_path / "out.json"
    assert command.main(["--ranks", "2", "4", "--sizes", "4096", "--json", str(out)]) == 1
    assert [row["case"] for row in json.loads(out.read_bytes())["rows"]] == ["ranks=2 bytes=4096"]
    assert "bench.py collectives: 4 ranks: ranks [3] failed" in capsys.readouterr().err
