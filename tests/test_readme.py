"""The front page holds: short enough to be read, it leads to every page of docs/, and the files it names exist
(tests/test_docs.py holds it and docs/ to more, tests/lab/docs/test_gendocs.py flags, metrics and errors to the
code)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LINES = 285
"""What is longer belongs into docs/: flags into none at all, they are generated; files into docs/map.md."""


def test_it_is_short():
    assert len(README.splitlines()) <= LINES


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_it_leads_to_every_page(page):
    name = page.relative_to(ROOT)
    assert f"]({name})" in README or f"]({name}#" in README


@pytest.mark.parametrize("page", ["README.md", "docs/map.md"])
def test_every_file_it_names_exists(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:attention|cache|connect|engine|lab|net|sched|scripts|tests|\.ci)/[\w./]*|\w+\.py)`", text)
    assert named
    room = {path.name for path in (ROOT / "attention").glob("*.py")}  # 'interface.py' in the row of `attention/`
    missing = [path for path in named if not (ROOT / path).exists() and path not in room]
    assert missing == []


@pytest.mark.parametrize("room", ["attention", "cache", "connect", "engine", "lab", "net", "sched"])
def test_every_room_is_on_the_map(room):
    """And every package in it, by its own name or by a file."""
    text = (ROOT / "docs/map.md").read_text()
    packages = [path.parent.relative_to(ROOT) for path in (ROOT / room).rglob("__init__.py")]
    assert packages
    assert [str(path) for path in packages if f"{path}/" not in text] == []


def test_the_map_itself_is_short():
    """Its own words: the lists of files are generated."""
    own = (ROOT / "docs/map.md").read_text().partition("<!-- generated: rooms -->")[0]
    assert len(own.split()) < 500


MOST_FILES = 20
NO_PACKAGES = ("lab/rdma_vm/guest", "net/http/common/assets")
"""Scripts of the guest system, and the live page."""


@pytest.mark.parametrize("room", ["attention", "cache", "connect", "engine", "lab", "net", "sched"])
def test_every_folder_lists_its_files_and_has_few(room):
    folders: dict[str, list[str]] = {}
    for path in (ROOT / room).rglob("*"):
        if path.suffix in (".py", ".h", ".c", ".cpp", ".js", ".sh"):
            folders.setdefault(str(path.parent.relative_to(ROOT)), []).append(path.name)
    assert [name for name, files in folders.items() if "__init__.py" not in files and name not in NO_PACKAGES] == []
    crowded = {name for name, files in folders.items() if len(files) - ("__init__.py" in files) > MOST_FILES}
    assert crowded == set()
