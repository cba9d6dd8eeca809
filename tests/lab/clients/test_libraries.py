"""The checks of client libraries, without the libraries: every module has checks, and a failure is told as one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.clients import runs
from lab.clients.runs import Unexpected

FOLDER = Path(runs.__file__).parent / "libraries"
MODULES = sorted(path.stem for path in FOLDER.glob("*_checks.py"))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_checks_and_imports_its_library_only_in_them(module):
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    checks = [one for one in tree.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    assert checks and all([arg.arg for arg in one.args.args] == ["server"] for one in checks)
    top = [one for one in tree.body if isinstance(one, ast.ImportFrom)]
    assert {one.module for one in top} <= {"__future__", "common", "pathlib", "typing"}


def test_a_library_that_is_missing_or_a_server_that_does_not_answer_fails_every_check():
    argv = [sys.executable, str(FOLDER / "run.py"), "agents_checks", "http://127.0.0.1:1", "m"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1 and len(told) == 4 and all(line["error"] for line in told)
    read = next(iter(runs.library("agents_checks")("python", runs.Target("http://x", "m", FOLDER, FOLDER)))).read
    with pytest.raises(Unexpected, match=r"agents_run: .*; agents_tool_and_output: "):
        read(done.stdout)
    assert read('{"check": "a", "error": null}\n') == "1 checks: a"
