"""scripts/test: a test that passes only alone, when it is tried again, is named at the end; --all runs every test."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAILED = {"tests/net/test_a.py::test_one": True, "tests/net/test_b.py::test_two[x-1]": True}
PYTHON = """#!/usr/bin/env bash
# Stands in for the interpreter: pytest fails at first, and leaves what it failed on.
echo "$*" >>calls
case "$*" in
  *--last-failed*) exit {again} ;;
  "-m pytest"*) exit 1 ;;
  *) exec {python} "$@" ;;
esac
"""


def run(root: Path, again: int, *arguments: str) -> tuple[int, list[str], list[str]]:
    """(exit code, stdout, arguments of each call of the interpreter) of scripts/test; `again`: pytest's second exit
    code."""
    for folder in ("scripts", ".venv/bin", ".pytest_cache/v/cache"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", root / "scripts" / "test")
    (root / ".pytest_cache/v/cache/lastfailed").write_text(json.dumps(FAILED, indent=2))
    for name, text in {
        "scripts/setup": "#!/bin/sh\n",
        ".venv/bin/python": PYTHON.format(again=again, python=shutil.which("python3")),
    }.items():
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    command = [root / "scripts" / "test", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout.splitlines(), (root / "calls").read_text().splitlines()


@pytest.mark.parametrize("again", [0, 1])
def test_what_passed_only_alone_is_named_at_the_end(tmp_path, again):
    code, told, _ = run(tmp_path, again)
    assert code == again
    if again:
        assert not any("FLAKY" in line for line in told)
    else:
        assert "FLAKY" in told[-3] and [line.strip() for line in told[-2:]] == [*FAILED]


@pytest.mark.parametrize(("arguments", "skips"), [([], True), (["--all"], False)])
def test_only_all_runs_the_heavy_tests_of_a_whole_run(tmp_path, arguments, skips):
    _, _, calls = run(tmp_path, 0, *arguments)
    assert calls[0].startswith("-m pytest --cache-clear ") and " -n " in calls[0]
    assert ("--skip-heavy" in calls[0].split()) == skips and "--all" not in calls[0]


def test_a_folder_can_be_left_out_of_a_whole_run(tmp_path):
    first = run(tmp_path, 0, "--without", "tests/attention")[2][0]
    assert first.startswith("-m pytest --cache-clear ") and first.endswith("--skip-heavy --ignore tests/attention")


def test_arguments_go_to_pytest(tmp_path):
    assert run(tmp_path, 0, "tests/cache", "-k", "pool")[2] == ["-m pytest tests/cache -k pool"]
