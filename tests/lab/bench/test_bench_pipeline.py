"""The rows of the benchmark of prefill groups, and the limit of two cores."""

from __future__ import annotations

import os
import time

import pytest
import torch

from lab.bench import pipeline
from lab.bench.common import cores
from lab.bench.common.results import marked


def measured(way: str, ttft_ms: float, stages: int) -> pipeline.Round:
    return pipeline.Round(way, ttft_ms, stages, 2 * ttft_ms, 50.0, 90.0, 9, 1.0, 40.0, 1.2, 5.0, 1.0, [])


def test_processor_time_counts_what_a_process_computes():
    begin, own = pipeline.processor_s(os.getpid()), time.process_time()
    while time.process_time() < own + 0.1:
        pass
    assert pipeline.processor_s(os.getpid()) > begin


def test_the_limit_is_what_two_processes_compute_at_once():
    ways = list(pipeline.WAYS)
    rounds = [measured(ways[0], 900.0, 1), measured(ways[0], 1000.0, 1), measured(ways[0], 1100.0, 1)]
    rounds += [measured(way, 800.0, 2) for way in ways[1:]]
    rows = pipeline.rows_of(rounds, 1.6, pipeline.flags([]))
    limits = {(row.case, row.metric): row.limits for row in rows if row.limits}
    alone = "TTFT, long prompt alone"
    assert limits == {(way, alone): {"two processes computing at once": pytest.approx(625.0)} for way in ways[1:]}
    found = next(row for row in rows if row.case == ways[1] and row.metric == alone)
    assert found.ours == 800.0 and found.peers == {ways[0]: 1000.0} and "1.60 times as much as one" in found.note
    tail = next(row for row in rows if row.case == ways[1] and row.metric == "TTFT of short prompts, p99")
    assert tail.samples == {"ours": 9, ways[0]: 9} and "their largest" in marked(tail).note


def test_a_process_stays_on_its_core_and_counts_its_products():
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        rate = cores.products_per_s(min(allowed), time.time() + 1, 0.05)
        with pytest.raises(SystemExit, match="too late"):
            cores.products_per_s(min(allowed), time.time() - 1, 0.05)
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
    assert rate > 0


def test_a_process_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(cores, "SECONDS", "never")
    with pytest.raises(RuntimeError, match="could not be measured"):
        cores._rates([0])
