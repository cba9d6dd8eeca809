"""The README is true: every flag is in its table, every file it names exists (tests/test_docs.py has more)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.flags import rows

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("group", "name", "default", "text"), list(rows()))
def test_every_flag_is_in_the_table(group, name, default, text):
    assert f"| `{name}` | {default} | {text} |" in README, "paste this row into the flags table of README.md"


def test_every_file_it_names_exists():
    named = re.findall(r"`((?:attention|cache|engine|net|sched|scripts|tests|\.ci)/[\w./]*|\w+\.py)`", README)
    assert named
    room = {path.name for path in (ROOT / "attention").glob("*.py")}  # 'interface.py' beside `attention/`
    missing = [path for path in named if not (ROOT / path).exists() and path not in room]
    assert missing == []
