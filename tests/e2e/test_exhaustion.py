"""Silent connections and a disk that is full or frozen, under load: the short form of scripts/faults.py exhaustion."""

from __future__ import annotations

import json
from pathlib import Path

from lab.faults import exhaustion


def test_floods_and_a_broken_disk_cost_no_request_no_token_and_no_block(tmp_path: Path, capsys) -> None:
    out = tmp_path / "exhaustion.json"
    assert exhaustion.main(["--quick", "--json", str(out)]) == 0, capsys.readouterr().err
    rows = {(row["case"], row["metric"]): row["ours"] for row in json.loads(out.read_text())["rows"]}
    for case in ("control", "http", "full", "freeze"):
        assert rows[case, "requests"] > 4
        assert rows[case, "errors"] == rows[case, "wrong tokens"] == rows[case, "blocks held afterwards"] == 0
    assert rows["control", "silent connections"] >= 600 <= rows["http", "silent connections"]
    assert rows["full", "disk troubles reported"] == rows["freeze", "disk troubles reported"] == 1
