"""Same seed, same bytes: the lab's commands in two processes whose strings hash differently."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import sys
from lab.ablations import command as ablate
from lab.planning import capacity, check as check_plan, command as plan
from lab.simulator import command as simulate
small = ["--generate", "chats", "--requests", "150", "--prefill", "3", "--decode", "2"]
small += ["--pool-blocks", "200", "--ssd-blocks", "2000"]
busy = ["--placement", "mooncake,power-of-two", "--gossip-loss", "0.1", "--crash-every-s", "20", "--seed", "7"]
assert simulate.main([*small, *busy, "--json", "simulate.json", "--jobs", "jobs.jsonl"]) == 0
states = ["--generate", "chats", "--requests", "60", "--pool-blocks", "200", "--state-every", "4"]
states += ["--model-geometry", "Qwen3-Next-80B", "--prefill", "3", "--decode", "2"]
assert simulate.main([*states, "--json", "states.json"]) == 0
for kind in simulate.GENERATORS:
    assert simulate.main(["--generate", kind, "--requests", "30", "--seed", "5", "--json", f"of-{kind}.json"]) == 0
few = ["--requests", "40", "--seeds", "2", "--workers", "1"]
assert ablate.main(["overlap", *few, "--json", "ablate.json", "--plot", "ablate.svg"]) == 0
lengths = ["--prompt", "4000,1.5", "--answer", "300,1", "--rate", "9", "--seed", "3", "--ttft-s", "60"]
assert plan.main([*lengths, "--json", "plan.json"]) == 0
assert check_plan.main(["--cases", "2", "--requests", "60", "--workers", "1", "--json", "check.json"]) in (0, 1)
loose = ["--ttft-s", "5", "--tolerance", "0.3", "--placement", "mooncake", "--seed", "2"]
assert capacity.main([*small, *loose, "--json", "capacity.json"]) == 0
"""
WRITTEN = {
    "simulate.json", "jobs-mooncake.jsonl", "jobs-power-of-two.jsonl", "ablate.json", "ablate.svg", "plan.json",
    "check.json", "capacity.json", "states.json",
}  # fmt: skip

MEASURED = re.compile(rb'"(load_before|others_share|quiet)": ([\d.e-]+|true|false)')
"""The load of the machine, and what other processes used of the cores while a command ran, follow from no seed."""


def start(folder: Path, hash_seed: int) -> subprocess.Popen[str]:
    folder.mkdir()
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    processes = [start(folder, seed) for seed, folder in enumerate(folders, 1)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    first, second = (
        {path.name: MEASURED.sub(b"", path.read_bytes()) for path in folder.iterdir()} for folder in folders
    )
    assert set(first) == set(second) >= WRITTEN
    different = {name for name in first if first[name] != second[name]}
    assert not different
