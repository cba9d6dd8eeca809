"""The result file of the launchers' tests, by a session of its own: written if all passed, and only then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.launchers.told import ERRORS, FIRST, VARIABLE

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
from tests.lab.launchers.told import FIRST, told

def test_one(told):
    told("a launcher", FIRST, 1.5)
    told.survived("a launcher", 9, 0)

def test_other(told):
    told("another", FIRST, 2.0)
    assert {holds}
"""


@pytest.mark.parametrize("holds", [True, False])
def test_a_session_writes_what_its_tests_told(tmp_path, holds):
    out, file = tmp_path / "new" / "out.json", tmp_path / "test_it.py"
    file.write_text(TESTS.format(holds=holds))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(file)]
    env = os.environ | {VARIABLE: str(out), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (0 if holds else 1), done.stdout + done.stderr
    assert out.exists() == holds
    if holds:
        told = json.loads(out.read_bytes())
        rows = {(row["case"], row["metric"]): (row["ours"], row["unit"]) for row in told["rows"]}
        assert rows["a launcher", FIRST] == (1.5, "s") and rows["another", FIRST] == (2.0, "s")
        assert rows["a launcher", ERRORS] == (0, "")
        assert told["config"]["cases"] == ["a launcher", "another"] and told["commit"]
