"""Result files are read on other machines: of the paths of this one they keep the last part."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def portable(value: Any) -> Any:
    """The same value with the folders taken off every path of this machine, in strings at any depth."""
    if isinstance(value, Path):
        return portable(str(value))
    if isinstance(value, str):
        return _PATH.sub(lambda found: found[0].rpartition("/")[2], value)
    if isinstance(value, Mapping):
        return {key: portable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [portable(part) for part in value]
    return value


def _path_of_here() -> re.Pattern[str]:
    here = {ROOT.parent, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix), Path(sys.base_prefix)}
    roots = sorted((str(root) for root in here if len(root.parts) > 1), key=len, reverse=True)
    return re.compile(rf"(?:{'|'.join(map(re.escape, roots))})(?:/[^\s'\",:;]+)+")


_PATH = _path_of_here()
