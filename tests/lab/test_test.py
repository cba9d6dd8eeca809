"""scripts/test: a test that passes only when it is tried again alone is named in the last lines."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
# Stands in for the interpreter: pytest fails at first, and leaves what it failed on.
case "$*" in
  *--last-failed*) exit {again} ;;
  "-m pytest"*) exit 1 ;;
  *) exec {python} "$@" ;;
esac
"""


@pytest.mark.parametrize("again", [0, 1])
def test_what_passed_only_alone_is_named_at_the_end(tmp_path, again):
    for folder in ("scripts", ".venv/bin", ".pytest_cache/v/cache"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts" / "test")
    failed = {"tests/net/test_a.py::test_one": True, "tests/net/test_b.py::test_two[x-1]": True}
    (tmp_path / ".pytest_cache/v/cache/lastfailed").write_text(json.dumps(failed, indent=2))
    for name, text in {
        "scripts/setup": "#!/bin/sh\n",
        ".venv/bin/python": PYTHON.format(again=again, python=shutil.which("python3")),
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run([tmp_path / "scripts" / "test"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == again, done.stderr
    last = done.stdout.splitlines()[-3:]
    if again:
        assert "FLAKY" not in done.stdout
    else:
        assert "FLAKY" in last[0] and [line.strip() for line in last[1:]] == [*failed]
