"""One node cut off the network of a real cluster, by the kernel: the short form of scripts/faults.py cut-nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults.runner import UNAVAILABLE

ROOT = Path(__file__).resolve().parents[2]


def test_a_node_cut_off_costs_no_request(tmp_path: Path):
    """In a process of its own: it enters a network namespace for good."""
    out = tmp_path / "cut.json"
    command = [sys.executable, str(ROOT / "scripts" / "faults.py"), "cut-nodes", "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    rows = {row["metric"]: row["ours"] for row in json.loads(out.read_text())["rows"]}
    assert rows["streams cut"] > 0, "the node was cut off when nothing ran"
    assert rows["requests"] > rows["streams cut"], "nothing was sent during the cut"
