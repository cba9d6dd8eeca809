"""A node of two restarted under load: no request fails. scripts/faults.py rolling-restart does it to all of them."""

from __future__ import annotations

import asyncio

from lab.faults.rolling_restart import measure
from tests.e2e.conftest import Start


def test_no_request_fails(start: Start, tiny_model):
    with start("mixed=2", *tiny_model, "--served-model-name", "model", "--calibration-ms", "0") as cluster:
        before = [node.pid for node in cluster.nodes]
        load = asyncio.run(measure(cluster, "model", ["mixed-0"], 30, 2, 12))
        after = [node.pid for node in cluster.nodes]
        assert before[0] != after[0] and before[1:] == after[1:]
    assert load.failed == []
    assert load.ok >= 30
