"""The README is true: every flag is in its table, every flag and file it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.flags import rows
from scripts.up import OWN_FLAGS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ELSEWHERE = {
    "--quick",
    "--url",
    "--base-url",
    "--peer",
    "--help",
    "--version",
    "--check",
    "--once",
    "--json",
}  # mooncake's own help, and ruff's
SCRIPTS = {"--peers", "--vllm-python", "--transformers-python", "--backend", "--serve"}  # bench_engine's, playground's
SCRIPTS |= {"--kills", "--flips", "--holders", "--minutes", "--disk", "--rounds", "--sizes", "--arena-mb"}  # store
SCRIPTS |= {"--test", "--live", "--only", "--aot", "--dry-run", "--head-size"}  # setup's and those of the GPU scripts
SCRIPTS |= {"--seeds", "--requests"}  # of the lab


@pytest.mark.parametrize(("group", "name", "default", "text"), list(rows()))
def test_every_flag_is_in_the_table(group, name, default, text):
    assert f"| `{name}` | {default} | {text} |" in README, "paste this row into the flags table of README.md"


def test_every_flag_it_names_exists():
    known = {name for _, names, _, _ in rows() for name in names.split(" / ")} | set(OWN_FLAGS) | ELSEWHERE | SCRIPTS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README)) - known == set()


def test_every_file_it_names_exists():
    named = re.findall(r"`((?:attention|cache|engine|net|sched|scripts|tests|\.ci)/[\w./]*|\w+\.py)`", README)
    assert named
    room = {path.name for path in (ROOT / "attention").glob("*.py")}  # 'interface.py' beside `attention/`
    missing = [path for path in named if not (ROOT / path).exists() and path not in room]
    assert missing == []
