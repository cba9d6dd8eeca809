"""scripts/bench.py store against itself: the limits and both ways of our store, in one short run."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[4] / "scripts"


def test_a_short_run_measures_checks_and_compares(tmp_path):
    path = tmp_path / "out.json"
    flags = [
        "--only",
        "memcpy,memcpy-2,store-shm,store-tcp",
        "--sizes",
        "4K,368K",
        "--batches",
        "1,8",
        "--arena-mb",
        "16",
    ]
    done = subprocess.run(
        [sys.executable, "bench.py", "store", *flags, "--rounds", "1", "--seconds", "0.02", "--json", str(path)],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "missing" not in done.stdout
    result = json.loads(path.read_text())
    assert result["config"]["failures"] == []
    speeds = [row for row in result["rows"] if row["metric"] == "GB/s"]
    assert len(speeds) == 2 * 2 * 2 * 2
    assert all(row["ours"] > 0 and row["rounds"] == 1 and row["threads"] for row in speeds)
    judged = {row["what"].split(":")[0] for row in result["config"]["goals"]}
    assert judged == {"read 368K x1", "write 368K x1"}
