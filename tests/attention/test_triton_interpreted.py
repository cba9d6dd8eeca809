"""Runs tests/attention/interpreted in one process with TRITON_INTERPRET=1: the kernels' arithmetic on a CPU.

By hand: TRITON_INTERPRET=1 pytest tests/attention/interpreted
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed: pip install -e .[triton]")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process runs them itself")
@pytest.mark.timeout(1500)
def test_interpreted(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/attention/interpreted"]
    command += ["--skip-heavy"] if pytestconfig.getoption("--skip-heavy") else []
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1480)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
