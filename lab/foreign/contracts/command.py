"""Classes of ours for SGLang and LMCache against the released packages (scripts/tools.py foreign-contracts).

    scripts/tools.py foreign-contracts --sglang VENV/bin/python --lmcache VENV/bin/python

Each interpreter has the package without its GPU dependencies, torch for CPUs, and what our package needs. Three store
nodes of ours run meanwhile. The result is a file in lab/results/ with the end of every check; one that failed makes the
exit code 1. docs/connect/ says how the virtual environments are made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from lab.conformance.answers import ours
from lab.launch.cluster import LocalCluster

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "results"
PACKAGES = ("sglang", "lmcache")
FLAGS = ("--model", "none", "--value-bytes", "256K", "--dram-bytes", "128M")
RUN_S = 600.0
VERSIONS = "import importlib.metadata as m, torch; print(m.version({package!r}), torch.__version__)"


def run(package: str, python: str, address: str) -> dict[str, Any]:
    """The end of every check of one package."""
    versions = subprocess.run(
        [python, "-c", VERSIONS.format(package=package)], capture_output=True, text=True, check=True
    )
    program = [python, str(HERE / f"{package}_program.py"), address]
    done = subprocess.run(program, env=ours(), cwd="/", capture_output=True, text=True, timeout=RUN_S)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    checks = {name: wrong or "ok" for name, wrong in lines}
    if not lines or (done.returncode and not any(wrong for _, wrong in lines)):
        checks["the program"] = f"ended with {done.returncode}"
    if any(end != "ok" for end in checks.values()):
        print(done.stderr[-6000:], file=sys.stderr)
    version, torch = versions.stdout.split()
    return {"version": version, "torch": torch, "checks": checks}


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        "tools.py foreign-contracts", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    for package in PACKAGES:
        parser.add_argument(f"--{package}", metavar="PYTHON", help=f"interpreter with {package}")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-foreign-contracts.json")
    args = parser.parse_args(argv)
    chosen = {package: python for package in PACKAGES if (python := getattr(args, package))}
    if not chosen:
        parser.error("name at least one interpreter")
    with (
        tempfile.TemporaryDirectory() as run_dir,
        LocalCluster("store=3", FLAGS, run_dir=Path(run_dir)) as cluster,
    ):
        address = ",".join(node.url.removeprefix("http://") for node in cluster.nodes)
        found = {package: run(package, python, address) for package, python in chosen.items()}
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.write_text(json.dumps(before | {"nodes": "store=3 " + " ".join(FLAGS)} | found, indent=1) + "\n")
    failures = 0
    for package, result in found.items():
        print(f"{package} {result['version']}, torch {result['torch']}")
        for name, end in result["checks"].items():
            failures += end != "ok"
            print(f"  {'ok    ' if end == 'ok' else 'FAILED'}  {name}{'' if end == 'ok' else ': ' + end}")
    print(args.out)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
