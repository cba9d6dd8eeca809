"""Mutates the built-in attention kernels one line at a time, and names the first check that finds each mutant.

  scripts/tools.py mutants                       # 20 minutes on two cores
  scripts/tools.py mutants --only cpu --json mutants.json
  scripts/tools.py mutants --name window         # mutants whose name contains a word

A mutant is one wrong line (lab/mutants/table.py): a wrong merge weight, a mask that is off by one, a missing split, a
stale tail. It is made in a copy of this checkout and compiled there. Kernels of the CPU must be found by the quick
reference grid, which scripts/playground.py runs on a user's kernel, too; Triton's by tests/attention/interpreted
without the heavy tests. For these it also says whether the quick grid finds them, in float32 under the interpreter; it
reaches neither the kernels of Hopper nor the delta rule. A mutant that survives is a hole in the checks: the command
then ends with exit code 1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.bench.common.results import write_result
from lab.mutants.mutant import CPU, KERNELS, TRITON, Mutant
from lab.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "results", ".*_cache", ".hypothesis")
CHECK_S = 900.0
"""The longest time of one mutant's checks."""

TESTS = {
    "decode": ("decode", "both"),
    "prefill": ("prefill",),
    "short": ("short",),
    "hopper": ("long",),
    "delta": ("delta",),
    "backend": (),
    "codes": (),
}
"""Tests of Triton's kernels -> the first words of the names of the mutants that they are likely to find."""

GRIDS: dict[str, tuple[str, dict[str, str]]] = {
    CPU: ("lab.mutants.first_fault", {}),
    TRITON: ("tests.attention.interpreted.first_fault", {"TRITON_INTERPRET": "1"}),
}
"""The module that runs the quick grid, and its environment."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Broken(Exception):
    """A check did not run; the message has its output."""


def found_by(mutant: Mutant | None, kernel: str, copy: Path) -> str | None:
    """The check that finds the mutant (None: the kernels as they are); None if none does. Raises Broken."""
    if mutant is not None:
        (copy / mutant.file).write_text(mutant.applied(ROOT))
    try:
        return _grid(copy, kernel) if kernel == CPU else _tests(copy, mutant.name.partition(":")[0] if mutant else "")
    finally:
        if mutant is not None:
            shutil.copy(ROOT / mutant.file, copy / mutant.file)


def fault_of_all(kernel: str, copy: Path) -> str | None:
    """What the kernels as they are fail; None if nothing. For Triton's, of the quick grid, too. Raises Broken."""
    return found_by(None, kernel, copy) or (_grid(copy, kernel) if kernel == TRITON else None)


def step_of(mutant: Mutant, copy: Path) -> str | None:
    """The first step of the quick grid that finds a mutant of Triton's kernels, or why it did not come to its end; None
    if no step does. The tests, not the grid, decide whether such a mutant is found."""
    (copy / mutant.file).write_text(mutant.applied(ROOT))
    try:
        return _grid(copy, mutant.kernel)
    except Broken as error:
        return f"it breaks off: {str(error).strip()[-200:]}"
    finally:
        shutil.copy(ROOT / mutant.file, copy / mutant.file)


def _grid(copy: Path, kernel: str) -> str | None:
    module, more = GRIDS[kernel]
    done = _run(copy, ["-m", module], more)
    if crash := _crash(done):
        return crash
    if done.returncode:
        raise Broken(done.stderr[-2000:])
    fault = json.loads(done.stdout)
    return fault and ": ".join(fault)


def _tests(copy: Path, part: str) -> str | None:
    """Those of the mutant's part come first."""
    names = sorted(TESTS, key=lambda name: part not in TESTS[name])
    which = [f"tests/attention/interpreted/test_{name}.py" for name in names]
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--skip-heavy", *which]
    done = _run(copy, command, {"TRITON_INTERPRET": "1"})
    if crash := _crash(done):
        return crash
    if done.returncode == 0:
        return None
    if done.returncode != 1 or not (failed := FAILED.search(done.stdout)):
        raise Broken(done.stdout[-2000:] + done.stderr[-2000:])
    return failed[1]


def _crash(done: subprocess.CompletedProcess[str]) -> str | None:
    """A mutant that reads or writes outside of all memory may end the process of the check: it is found."""
    crashes = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
    ended = [one for one in crashes if done.returncode == -one]
    return f"the process of the check ends by {ended[0].name}" if ended else None


def _run(copy: Path, arguments: list[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(copy / "cache-of-mutants"), "PYTHONPATH": str(copy), **more}
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=CHECK_S)
    except subprocess.TimeoutExpired as error:
        raise Broken(f"not done after {CHECK_S:g} s: {error.cmd}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """0 = all found, 1 = one survives, 2 = a check did not run or fails without a mutant."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KERNELS, help="kernels of one kind")
    parser.add_argument("--name", default="", metavar="WORD", help="only mutants whose name contains it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write which check found which mutant")
    args = parser.parse_args(argv)
    chosen = [one for one in MUTANTS if args.only in (None, one.kernel) and args.name in one.name]
    if not chosen:
        parser.error(f"--name {args.name}: no mutant has this word in its name")
    console = Console(highlight=False, soft_wrap=True)
    rows: list[dict[str, Any]] = []
    survivors, broken = 0, ""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        try:
            for kernel in dict.fromkeys(one.kernel for one in chosen):
                if check := fault_of_all(kernel, copy):
                    raise Broken(f"{kernel}: the kernels as they are fail {check}")
            for one in chosen:
                check = found_by(one, one.kernel, copy)
                survivors += check is None
                console.print(f"{one.kernel}, {one.name}: {check or 'SURVIVES'}", markup=False)
                found = {"metric": "found", "unit": "", "ours": int(check is not None), "check": check}
                if one.kernel == TRITON:
                    found["quick_grid"] = step = step_of(one, copy)
                    console.print(f"  quick grid: {step or 'does not show it'}", markup=False)
                rows.append({"case": f"{one.kernel}, {one.name}"} | found)
        except (Broken, ValueError) as error:
            broken = str(error)
    if args.json and rows:  # of a run that broke, what it found until then
        write_result({"tool": "mutants", "broken": broken}, rows, args.json)
    if broken:
        print(f"mutants: {broken}", file=sys.stderr)
        return 2
    console.print(f"{len(chosen) - survivors} of {len(chosen)} mutants found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
