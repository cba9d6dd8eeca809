"""Values that were not measured are missing in a result, never an invented number; percentiles name their number."""

import pytest

from lab.bench import backends, batches, offload, serve
from lab.bench.common.client import Outcome
from lab.bench.common.latency import Measured
from lab.bench.common.results import marked
from lab.bench.common.serve_flags import parse


def test_answers_of_one_token_have_no_gap():
    rows = batches._compared("TBT", [], [])
    assert [row.ours for row in rows] == [None] * 4 and all(not row.limits for row in rows)
    alone, next_to = batches._compared("TTFT", [0.2] * 30, [0.1] * 40)[2:]
    assert (alone.ours, next_to.ours, next_to.peers["alone"]) == pytest.approx((100, 200, 100))
    assert next_to.limits == {"goal": pytest.approx(110)} and next_to.samples == {"ours": 30, "alone": 40}


def test_a_policy_of_which_every_request_failed_has_no_times():
    good = Outcome(0.0, 0.0, 0.5, [0.1], 0.6, 10, 4, 2, True, None)
    found = backends.rows({"mooncake": [Measured([Outcome()], 1.0)], "random": [Measured([good, Outcome()], 1.0)]})
    rows = {row.metric: row for row in found}
    assert rows["median_ttft"].ours is None and rows["median_ttft"].peers == {"random": pytest.approx(500)}
    assert rows["failed"].ours == 1 and rows["p99_ttft"].samples == {"ours": 0, "random": 1}


def test_a_folder_that_is_not_there_is_refused_before_minutes_of_measuring(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        offload.flags(["--offload-path", str(tmp_path / "nowhere")])
    assert end.value.code == 2 and "there is no such folder" in capsys.readouterr().err


def test_percentiles_of_the_serving_benchmark_say_how_many_requests_they_are_of():
    args = parse([], "")
    good = [Outcome(0.0, 0.0, 0.5, [0.1], 0.6, 10, 4, 2, True, None)] * 60
    bench = serve.Benchmark(float("inf"), {"ours": [Measured([*good, Outcome()], 1.0)]})
    rows = {row.metric: row for row in serve.rows_of(args, bench)}
    assert rows["p99_ttft"].samples == rows["p90_e2el"].samples == {"ours": 60}
    assert "fewer than 100 samples" in marked(rows["p99_ttft"]).note and not marked(rows["p90_e2el"]).note
    assert rows["p99_itl"].samples == rows["mean_ttft"].samples == rows["completed"].samples == {}
