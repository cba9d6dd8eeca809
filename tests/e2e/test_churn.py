"""Nodes of every role that end and begin under load: the short form of scripts/faults.py churn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.faults.soak import churn

LIMITS = ("--most-mib", "64", "--most-files", "8")
"""Growth of memory is judged in long runs: here caches still fill."""


@pytest.mark.heavy
def test_nothing_is_lost_and_nothing_remains_of_nodes_that_end(tmp_path: Path, capsys) -> None:
    out = tmp_path / "churn.json"
    assert churn.main(["--quick", *LIMITS, "--json", str(out)]) == 0, capsys.readouterr().err
    rows = {(row["case"], row["metric"]): row["ours"] for row in json.loads(out.read_text())["rows"]}
    for none in ("errors", "wrong tokens", "blocks held afterwards", "segments of dead nodes"):
        assert rows["churn", none] == 0
    assert rows["churn", "connections to dead nodes"] == rows["churn", "directories of dead nodes"] == 0
    assert rows["churn", "requests"] > 10 and rows["churn", "turns"] >= 1
    for kind in ("prefill", "decode", "store"):
        assert rows[f"{kind} nodes", "growth of open files"] is not None
