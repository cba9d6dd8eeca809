"""What programs of others get from the process that starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lab.foreign.common.processes import environment

ROOT = Path(__file__).resolve().parents[4]


def test_a_program_of_others_does_not_see_this_checkout(monkeypatch):
    """It would find mooncake.py here under the name of upstream's package."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    find = [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('mooncake'))"]
    here = subprocess.run(find, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "mooncake.py" in here.stdout
    elsewhere = subprocess.run(
        find, cwd=ROOT, env=environment({"OF": "it"}), capture_output=True, text=True, check=True
    )
    assert "mooncake.py" not in elsewhere.stdout
    assert environment({"OF": "it"})["OF"] == "it" and environment({"PYTHONPATH": "/given"})["PYTHONPATH"] == "/given"
