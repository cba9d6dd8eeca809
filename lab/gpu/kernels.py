"""The kernel tests that CI runs interpreted, on the GPU: one pytest per file, all in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lab.gpu.checks import Check, failed

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "attention" / "interpreted"
WORKERS = 3
"""Processes per file if pytest-xdist is installed: most of the time the host compiles."""


def measure() -> Iterator[Check]:
    """One line per file, in the order in which they end."""
    files = sorted(TESTS.glob("test_*.py"))
    with tempfile.TemporaryDirectory() as folder:
        running = {file.stem: start(file, Path(folder, file.stem + ".xml")) for file in files}
        try:
            while running:
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    running.pop(name)
                    yield check_of(name, Path(folder, name + ".xml"))
                time.sleep(0.2)
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def start(file: Path, report: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
    if find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"})


def check_of(name: str, report: Path) -> Check:
    """The line from pytest's JUnit report."""
    if not report.exists():
        return failed("kernels", name, "pytest wrote no report; see the section's output")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    ran = [case for case in cases if case.find("skipped") is None]
    broken = [
        case.get("name", "?") for case in ran if case.find("failure") is not None or case.find("error") is not None
    ]
    if not ran:
        return failed("kernels", name, "no test ran; see the section's output")
    note = f"failed: {', '.join(broken[:5])}" if broken else ""
    return Check("kernels", name, "tests passed", len(ran) - len(broken), len(ran), goal=1.0, note=note)
