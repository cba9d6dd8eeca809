"""The modules of the house, for the tests that read their source."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "attention", "cache", "connect", "net", "sched", "lab")


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the house."""
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    top = ROOT / "mooncake.py"
    return named | ({"mooncake": top} if top.exists() else {})


MODULES = modules()


def within(name: str, rules: tuple[str, ...]) -> bool:
    return any(name == rule or name.startswith(rule + ".") for rule in rules)
