"""Some of the kernel tests under compute-sanitizer's memcheck: no access outside allocated memory.

torch allocates each tensor separately meanwhile (PYTORCH_NO_CUDA_MEMORY_CACHING), so that an access beyond a tensor
leaves its allocation and is detected.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from lab.gpu.checks import Check, failed, skipped
from lab.gpu.kernels import ROOT, TESTS

MEMCHECK = {
    "test_decode.py": ("test_window", "test_soft_cap"),
    "test_prefill.py": ("test_window",),
    "test_short.py": ("test_window",),
    "test_hopper.py": ("test_block_sizes",),
    "test_write.py": ("test_write_into_another_type",),
    "test_norm_gate.py": ("test_add_rms_norm", "test_gates"),
    "test_work.py": ("test_queries_are_cut_at_a_fixed_chunk",),
}
"""A few sizes of every kernel: the sanitizer makes kernels about ten times slower."""

FOUND_ERRORS = 86


def measure() -> Iterator[Check]:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        why = "compute-sanitizer is not installed (it comes with the CUDA toolkit): memcheck did not run"
        yield skipped("sanitizer", "memcheck", why)
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND_ERRORS), sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", *nodes()]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    yield verdict(done.returncode, done.stdout + done.stderr)


def nodes() -> list[str]:
    """The test ids for pytest."""
    return [f"{TESTS / file}::{test}" for file, tests in MEMCHECK.items() for test in tests]


def verdict(code: int, output: str) -> Check:
    """The line from the exit code and the sanitizer's last line."""
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    passed = re.findall(r"(\d+) passed", output)
    if not summary or not passed:
        lines = [line for line in output.splitlines() if line.strip()]
        return failed("sanitizer", "memcheck", f"exit code {code}: {' | '.join(lines[-2:])}")
    errors = int(summary[-1])
    clean = code == 0 and errors == 0
    note = "" if clean else f"{errors} errors, exit code {code}; see the section's output"
    return Check(
        "sanitizer", "memcheck", "clean test runs", int(passed[-1]) if clean else 0, int(passed[-1]), 1.0, note=note
    )
