"""Commands of a table end by SIGTERM as by Ctrl-C: what they started ends with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import subprocess, sys, time


def main():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        print(child.pid, flush=True)
        time.sleep(600)
    finally:
        child.kill()
        child.wait()
"""


def test_a_command_that_is_ended_ends_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "slow_command.py").write_text(COMMAND)
    program = "from lab.commands import run; import sys; sys.exit(run('p', 'd', {'slow': 'slow_command'}))"
    path = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    with subprocess.Popen(
        [sys.executable, "-c", program, "slow"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        child = int(command.stdout.readline())
        command.terminate()
        command.wait(30)
    assert command.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize("command", ["faults.py ranks-soak", "simulate.py --help", "playground.py --help"])
def test_a_python_without_the_packages_is_told_to_run_setup(command: str, tmp_path: Path) -> None:
    name, *rest = command.split()
    checkout = tmp_path / "a folder with spaces"
    checkout.symlink_to(Path.cwd())
    script = checkout / "scripts" / name
    done = subprocess.run(
        [sys.executable, "-S", script, *rest], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"scripts/{name}: this Python lacks ")
    assert line.endswith(f": run scripts/setup, then .venv/bin/python scripts/{name}")
