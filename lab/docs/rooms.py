"""Writes the list of files in every `__init__.py` and docs/map.md from the first sentence of each file.

A file is described in one place, its own docstring. scripts/gendocs.py copies that sentence into the `__init__.py` of
the folder and into the map; a test compares them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOMS = ("attention", "cache", "connect", "net", "sched", "engine", "lab")
SOURCES = (".py", ".c", ".cpp", ".h")
HEAD = "\nFiles:\n"
WIDTH = 118
LONGEST = 116  # characters of a sentence, which then fits on the first line of a docstring


def folders(root: Path, room: str) -> Iterator[Path]:
    """The room and every package below it, parents first."""
    yield from (path.parent for path in sorted((root / room).rglob("__init__.py"), key=lambda path: path.parts))


def sentence(path: Path) -> str:
    """The first sentence of a file's docstring or first comment; of a folder, that of its `__init__.py`.
    Raises ValueError if it is too long for a list."""
    path = path / "__init__.py" if path.is_dir() else path
    text = path.read_text()
    if path.suffix == ".py":
        about = ast.get_docstring(ast.parse(text)) or ""
    else:
        found = re.match(r"/\*(.*?)\*/|((?://.*\n)+)", text, re.DOTALL)
        about = re.sub(r"^\s*(//|\*)\s?", "", found[1] or found[2], flags=re.MULTILINE) if found else ""
    own = re.match(rf"{re.escape(path.stem.replace('_', ''))}:\s+", about, flags=re.IGNORECASE)  # the file's name
    about = about[own.end() :] if own else about
    text = " ".join(about.partition("\n\n")[0].split())
    first = re.split(r"(?<=[.!?])(?<!Fig\.)\s", text, maxsplit=1)[0]
    first = re.sub(r"\s+\([^()]*\)$", "", first.rstrip(".:;,")).rstrip(".:;,")
    if len(first) > LONGEST:
        raise ValueError(f"{path}: the first sentence has {len(first)} characters, more than {LONGEST}")
    return first[:1].upper() + first[1:] if own else first


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.suffix in SOURCES and path.name != "__init__.py"]


def contents(folder: Path) -> list[tuple[str, str]]:
    """(name, sentence) of every file and package of the folder, packages last and with a slash."""
    rooms = [path for path in sorted(folder.iterdir()) if (path / "__init__.py").exists()]
    named = [(path.stem if path.suffix == ".py" else path.name, sentence(path)) for path in files(folder)]
    return named + [(f"{path.name}/", sentence(path)) for path in rooms]


def listing(folder: Path) -> str:
    rows = contents(folder)
    width = max((len(name) for name, _ in rows), default=0) + 2
    lines = []
    for name, about in rows:
        wrapped = textwrap.wrap(about, WIDTH - 4 - width) or [""]
        lines.append(f"    {name:{width}}{wrapped[0]}".rstrip())
        lines += [" " * (4 + width) + line for line in wrapped[1:]]
    return "\n".join(lines)


def package(path: Path) -> str:
    """The text of an `__init__.py`, its docstring ending with the list of the folder's files."""
    text = path.read_text()
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant), f"{path} has no docstring"
    about = ast.get_docstring(ast.parse(text), clean=False) or ""
    about = about.partition(HEAD)[0].rstrip()
    listed = listing(path.parent)
    docstring = f'"""{about}\n{HEAD}{listed}\n"""' if listed else f'"""{about}"""'
    rest = "\n".join(text.split("\n")[node.end_lineno :])
    return f"{docstring}\n{rest}" if rest.strip() else f"{docstring}\n"


RULES = "tests/test_architecture.py"


def may_use(root: Path, room: str) -> str:
    """The rooms that this one may import, from USES of the architecture test, with the rules of single modules."""
    (uses,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((root / RULES).read_text()).body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["USES"]
    ]
    others: dict[frozenset[str], list[str]] = {}
    for rule, rooms in uses.items():
        if rule.startswith(f"{room}."):
            path = Path(*rule.split("."))
            file = path if (root / path).is_dir() else path.with_suffix(".py")
            others.setdefault(frozenset(rooms), []).append(f"`{file}`")
    said = [_rooms(uses[room])]
    for rooms, names in others.items():
        only = "only " if rooms < uses[room] else ""
        said.append(f"{', '.join(names)}: {only}{_rooms(rooms)}")
    return "; ".join(said)


def _rooms(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}/`" for name in sorted(names)) or "nothing"


def with_uses(root: Path, page: str) -> str:
    """The page with the last cell of each row of a room filled from the architecture test."""

    def row(found: re.Match[str]) -> str:
        return f"{found[1]} {may_use(root, found[2])} |"

    return re.sub(rf"^(\| `({'|'.join(ROOMS)})/` \| [^|]+ \|)[^|\n]*\|$", row, page, flags=re.MULTILINE)


def tree(root: Path) -> str:
    """Every room and folder with the first sentence of each file, as Markdown."""
    parts = []
    for room in ROOMS:
        for folder in folders(root, room):
            name = str(folder.relative_to(root))
            level = "##" if name == room else "###"
            rows = [f"- `{file}`: {about}" for file, about in contents(folder)]
            parts.append("\n".join([f"{level} {name}/", "", f"{sentence(folder)}.", "", *rows, ""]))
    return "\n".join(parts)
