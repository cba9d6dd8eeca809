"""A node of two restarted under load: no request fails. scripts/faults.py rolling-restart does it to all of them."""

from __future__ import annotations

import asyncio

from lab.faults.client import random_bodies
from lab.faults.rolling_restart import failures, restart_all
from tests.e2e.conftest import Start

SEED = 20261123


def test_no_request_fails(start: Start, tiny_model):
    print(f"seed {SEED}")
    with start("mixed=2", *tiny_model, "--served-model-name", "model", "--calibration-ms", "0") as cluster:
        before = [node.pid for node in cluster.nodes]
        bodies = [body | {"model": "model"} for body in random_bodies(20, 40, 12, SEED)]
        load = asyncio.run(restart_all(cluster, bodies, ["mixed-0"], 30, 2))
        after = [node.pid for node in cluster.nodes]
        assert before[0] != after[0] and before[1:] == after[1:]
    assert failures(load) == []
    assert len(load.requests) >= 30
