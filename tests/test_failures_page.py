"""Every row of docs/failures.md names what shows it, and that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = [line for line in (ROOT / "docs" / "failures.md").read_text().splitlines() if line.startswith("| ")]


def test_every_row_names_tests_that_exist():
    head, *rows = ROWS
    assert head.split("|")[-2].strip() == "shown by" and len(rows) > 15
    for row in rows:
        shown = row.split("|")[-2]
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
        assert tests, f"no test: {row}"
        for path, name in tests:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_file_it_names_exists():
    named = {name for row in ROWS for name in re.findall(r"`([a-z]\w*/[\w/.]+\.py)(?:::\w+)?`", row)}
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
