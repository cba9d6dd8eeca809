"""Concurrent puts at real store nodes, in calm and across a cut: the short form of scripts/faults.py put-histories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults import put_histories
from lab.faults.runner import UNAVAILABLE

ROOT = Path(__file__).resolve().parents[2]


def test_what_clients_see_of_concurrent_puts_is_what_the_docs_say(tmp_path: Path, capsys):
    """In a process of its own: it enters a network namespace for good. Where there is none, the part without a cut
    runs alone."""
    out = tmp_path / "puts.json"
    command = [sys.executable, str(ROOT / "scripts" / "faults.py"), "put-histories", "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    cut = done.returncode != UNAVAILABLE
    if not cut:
        assert put_histories.main(["--quick", "--cut-s", "0", "--json", str(out)]) == 0, capsys.readouterr().err
    else:
        assert done.returncode == 0, done.stderr
    rows = {(row["case"], row["metric"]): row["ours"] for row in json.loads(out.read_text())["rows"]}
    assert rows["calm", "histories not linearizable"] == 0 < rows["calm", "keys put by all clients"]
    if not cut:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert rows["cut", "keys first put on both sides"] > 0, "the sides saw each other"
    assert rows["healed", "keys read differently at last"] == 0
