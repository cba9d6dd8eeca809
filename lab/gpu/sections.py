"""Runs each section in a separate process. A section that crashes, hangs or runs out of memory does not affect the
others.

A section writes one JSON object per line into a file as it measures, so the lines of a section that dies are kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from lab.gpu.checks import Check, failed

BUDGET_S = {
    "kernels": 160,
    "sanitizer": 60,
    "attention": 115,
    "tiles": 60,
    "engine": 125,
    "staging": 10,
    "serving": 65,
    "ranks": 75,
}
"""Seconds per section, in the order in which they run: under ten minutes together on one GPU, on which `ranks` takes a
few seconds."""

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "tools.py"
LAST_LINES = 3


def run_sections(
    names: Sequence[str], folder: Path, save: Callable[[Sequence[Check]], None], flags: Sequence[str] = ()
) -> list[Check]:
    """All lines of the named sections. `save` gets the lines so far after every section. flags: more of gpu-check's."""
    checks: list[Check] = []
    for name in names:
        command = [
            sys.executable,
            str(SCRIPT),
            "gpu-check",
            "--section",
            name,
            "--lines",
            str(folder / f"{name}.jsonl"),
            *flags,
        ]
        checks += run_section(name, command, folder, BUDGET_S[name])
        save(checks)
    return checks


def run_section(name: str, command: Sequence[str], folder: Path, budget_s: float) -> list[Check]:
    """The lines that `command` writes to folder/name.jsonl within `budget_s` seconds, and a line with the reason if it
    failed. Its output is in folder/name.log."""
    lines, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    lines.unlink(missing_ok=True)
    print(f"{name}: up to {budget_s:.0f} s, output in {log} ...", flush=True)
    began, why = time.monotonic(), ""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(budget_s)
            if code:
                why = f"exit code {code}: {ending(log)}"
        except subprocess.TimeoutExpired:
            why = f"stopped after {budget_s:.0f} s; {ending(log)}"
        finally:
            stop(process)
    checks = list(read(lines))
    if why or not checks:
        checks.append(failed(name, "the rest of the section", why or "it measured nothing"))
    print(f"{name}: {len(checks)} lines in {time.monotonic() - began:.0f} s", flush=True)
    return checks


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:]) or "no output"


def read(lines: Path) -> Iterator[Check]:
    if not lines.exists():
        return
    for line in lines.read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue  # the section was stopped in the middle of its last line
        yield Check(**values)


def serve_section(name: str, lines: Path) -> None:
    """The child's side: measure, line by line."""
    measure: Callable[[], Iterator[Check]] = import_module(f"lab.gpu.{name}").measure
    with lines.open("w") as file:
        for check in measure():
            file.write(json.dumps(asdict(check)) + "\n")
            file.flush()
