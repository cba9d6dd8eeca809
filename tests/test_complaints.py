"""The rule of complaints.py, on a suite of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.complaints import complaints

ROOT = Path(__file__).resolve().parent.parent
SUITE = """
import asyncio, logging, pytest
from pathlib import Path
from tests.complaints import no_unexpected_errors, no_unexpected_errors_at_the_end

log = logging.getLogger("x")

async def bug():
    raise KeyError("unseen")

async def test_a_task_that_nobody_awaits():
    asyncio.get_running_loop().create_task(bug())
    await asyncio.sleep(0)
    await asyncio.sleep(0)

async def test_a_callback():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)

def test_a_line(caplog):
    log.error("wrong")
    caplog.clear()  # hides nothing

@pytest.mark.expects_error("wr.ng")
def test_an_expected_line():
    log.error("wrong")

@pytest.mark.expects_error("wrong")
def test_another_line():
    log.error("worse")

@pytest.mark.expects_error("wrong")
def test_no_line():
    pass

@pytest.mark.expects_error("wrong", always=False)
def test_maybe():
    pass

def test_a_warning():
    log.warning("well")

def test_a_node(tmp_path):
    import os, sys, time
    from lab.launch.nodes import spawn
    argv = [sys.executable, "-c", "import sys; sys.stderr.write('2026-01-01 00:00:00,000 E mooncake.x: bad\\\\n')"]
    spawn("n0", "store", argv, tmp_path, dict(os.environ)).process.wait()
"""


def test_error_lines_fail_the_tests_that_do_not_name_them(tmp_path):
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    flags = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-rA", "-q"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, str(suite)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    ends = {}
    for line in ran.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("PASSED", "ERROR") and "::test_" in rest:
            ends.setdefault(rest.partition("::")[2].split(" ")[0], set()).add(kind)
    failed = {name for name, kinds in ends.items() if "ERROR" in kinds}
    assert failed == {
        "test_a_task_that_nobody_awaits",
        "test_a_callback",
        "test_a_line",
        "test_another_line",
        "test_no_line",
        "test_a_node",
    }, ran.stdout
    assert {"test_an_expected_line", "test_maybe", "test_a_warning"} <= ends.keys()
    told = ("Task exception was never retrieved", "KeyError: 'unseen'", "ZeroDivisionError", "expects_error(", "[n0]")
    for words in told:
        assert words in ran.stdout


def test_entries_of_a_nodes_log():
    text = "\n".join(
        [
            "2026-11-22 10:00:00,000 I mooncake.node: ready",
            "2026-11-22 10:00:00,001 E mooncake.node: bad",
            "Traceback (most recent call last):",
            "KeyError: 1",
            "2026-11-22 10:00:00,002 W mooncake.net: slow",
            "Traceback (most recent call last):",
            "OSError: 2",
            '{"time": "t", "level": "info", "logger": "x", "message": "level error"}',
            '{"time": "t", "level": "critical", "logger": "x", "message": "end"}',
        ]
    )
    found = complaints(text)
    assert [entry.splitlines()[-1][-9:] for entry in found] == ["KeyError: 1"[-9:], "OSError: 2"[-9:], '": "end"}']
    assert complaints("Traceback (most recent call last):\n  x\nImportError: y") != []
