"""Clusters of fake nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.launch.cluster import Processes

FAKE = (sys.executable, str(Path(__file__).with_name("fake_node.py")))


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Keyword arguments of a LocalCluster whose nodes are fakes."""
    members, run_dir = tmp_path / "members", tmp_path / "run dir"
    members.mkdir()
    run_dir.mkdir()
    monkeypatch.setenv("FAKE_MEMBERS", str(members))
    return {"processes": Processes(program=FAKE, start_timeout_s=60.0), "run_dir": run_dir}
