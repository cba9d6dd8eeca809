"""Classes of ours for SGLang and LMCache against the released packages (scripts/tools.py foreign-contracts).

    scripts/tools.py foreign-contracts --sglang VENV/bin/python --lmcache VENV/bin/python [--json PATH]

Each interpreter has the package without its GPU dependencies, torch for CPUs, and what our package needs. Three store
nodes of ours run meanwhile. A check that failed makes the exit code 1. docs/connect/ says how
the virtual environments are made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.bench.common.results import write_result
from lab.conformance.answers import ours
from lab.launch.cluster import LocalCluster

HERE = Path(__file__).resolve().parent
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
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to PATH as JSON")
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
    rows = []
    for package, result in found.items():
        print(f"{package} {result['version']}, torch {result['torch']}")
        for name, end in result["checks"].items():
            rows.append({"case": f"{package}: {name}", "metric": "holds", "unit": "", "ours": float(end == "ok")})
            print(f"  {'ok    ' if end == 'ok' else 'FAILED'}  {name}{'' if end == 'ok' else ': ' + end}")
    if args.json is not None:
        versions = {package: {"version": one["version"], "torch": one["torch"]} for package, one in found.items()}
        write_result({"check": "foreign-contracts", "nodes": "store=3 " + " ".join(FLAGS)} | versions, rows, args.json)
    return 0 if all(row["ours"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
