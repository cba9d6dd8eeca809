"""The result of a check, and the machine that it examines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A `fail` keeps a node from doing what its flags say, a `warn` makes it slower."""

    check: str
    status: str  # OK, WARN or FAIL
    found: str
    remedy: str = ""  # what to do about it; empty when there is nothing to do


@dataclass(frozen=True, slots=True)
class System:
    """The machine as the checks see it; tests give a root of their own."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def read(self, path: str) -> str:
        """The file's text without the white space around it; empty where there is none."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What a directory holds, in order; empty where there is none."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []


Check = Callable[[System], list[Finding]]


def careful(name: str, check: Check, system: System) -> list[Finding]:
    """What the check finds; an error in it is a finding too, for the doctor has to come to its end."""
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
