"""scripts/bench_store.py against itself: the limits and both ways of our store, in one short run."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_a_short_run_measures_checks_and_compares(tmp_path):
    path = tmp_path / "out.json"
    flags = ["--only", "memcpy,store-shm,store-tcp", "--sizes", "4K,368K", "--batches", "1,8", "--arena-mb", "8"]
    done = subprocess.run(
        [sys.executable, "bench_store.py", *flags, "--rounds", "1", "--seconds", "0.02", "--json", str(path)],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "missing" not in done.stdout
    rows = json.loads(path.read_text())["rows"]
    cells = {(row["peer"], row["op"], row["size"], row["batch"]) for row in rows if "peer" in row}
    assert len(cells) == 3 * 2 * 2 * 2
    assert all(row["gbs"] > 0 for row in rows if "peer" in row)
    assert {row["what"].split(":")[0] for row in rows if "met" in row} == {"read 368K x1", "write 368K x1"}
