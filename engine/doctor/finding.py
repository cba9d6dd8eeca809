"""The result of a check, and the machine that it examines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. With a `fail`, a node cannot do what its flags require; with a `warn`, it is slower."""

    check: str
    status: str  # OK, WARN or FAIL
    found: str
    remedy: str = ""  # how to fix it; empty if there is nothing to fix


@dataclass(frozen=True, slots=True)
class System:
    """The machine as the checks see it; tests pass another root."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def read(self, path: str) -> str:
        """The file's text without surrounding white space; empty if there is no file."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; empty if there is no directory."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []


Check = Callable[[System], list[Finding]]


def careful(name: str, check: Check, system: System) -> list[Finding]:
    """The findings of the check. An error in the check becomes a finding, so that the doctor always finishes."""
    try:
        return check(system)
    except Exception as error:
        return [Finding(name, WARN, f"could not be checked: {type(error).__name__}: {error}")]


def size(nbytes: float) -> str:
    """'1.5 GiB'"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
