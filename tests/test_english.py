"""The language of the code and of docs/: plain words that a reader of technical English expects."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

from lab.docs.rooms import ROOMS, SOURCES, sentence
from tests.modules import ROOT

UNUSUAL = re.compile(r"\b(beside|anew|whoever|whilst|hence|so many)\b", re.IGNORECASE)
"""Say next to, again, the one that, while, therefore, this many."""

KINDS = ("*.py", "*.md", "*.h", "*.c", "*.cpp", "*.js", "*.html", "*.sh", "*.toml", "scripts", ".ci")
TEXTS_FOR_MODELS = ("lab/bench/requests.py", "lab/bench/speculative.py")
"""Their prompts are long texts in any words."""


def prose(path: Path) -> str:
    """The comments and strings of a Python file; the whole text of any other."""
    text = path.read_text(errors="replace")
    if path.suffix != ".py":
        return text
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    return "\n".join(one.string for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type in kinds)


def test_no_unusual_words():
    listed = subprocess.run(["git", "ls-files", *KINDS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split() if not name.startswith(("tests/", "lab/results/"))]
    assert len(names) > 500
    found = [
        f"{name}: {match[0]}"
        for name in names
        if name not in TEXTS_FOR_MODELS and (ROOT / name).is_file()
        for match in UNUSUAL.finditer(prose(ROOT / name))
    ]
    assert found == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_first_sentence_of_a_file_begins_with_its_subject(room):
    """Not with "What ...", which has no subject."""
    files = [path for path in (ROOT / room).rglob("*") if path.suffix in SOURCES]
    assert files
    assert [str(path.relative_to(ROOT)) for path in files if sentence(path).startswith("What ")] == []
