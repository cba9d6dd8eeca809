"""Makes result files portable: paths of this machine are cut to their last part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVERYWHERE = ("dev", "proc", "sys")
"""Folders that mean the same on every Linux."""

_PATH = re.compile(r"(?<![\w.:/-])/([\w.-]+)(?:/[^\s'\",:;/]+)+/?")


def portable(value: Any) -> Any:
    """The same value without the folders of this machine's paths, in strings at any depth."""
    if isinstance(value, Path):
        return portable(str(value))
    if isinstance(value, str):
        return _PATH.sub(_last_part, value)
    if isinstance(value, Mapping):
        return {key: portable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [portable(part) for part in value]
    return value


def _last_part(found: re.Match[str]) -> str:
    here = found[1] not in EVERYWHERE and Path("/", found[1]).is_dir()
    return found[0].rstrip("/").rpartition("/")[2] if here else found[0]
