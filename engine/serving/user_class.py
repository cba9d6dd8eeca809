"""A class from a file of the user's own: `--placement mine.py` or `mine.py:Name`.

The file is Python and is run as part of this process, with its rights: name only files you would run yourself. It comes
from the command line only; nothing that arrives over the network reaches this module.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any


def is_file(spec: str) -> bool:
    """True if `spec` is meant as a file: 'mine.py', 'dir/mine.py:Name'."""
    return _split(spec)[0].endswith(".py")


def load_class(flag: str, spec: str, methods: Collection[str]) -> Any:
    """What is called `Name` in the file; without a name, the only class there that has all `methods`. Raises ValueError
    that names `flag` and what is wrong."""
    file, wanted = _split(spec)
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"{flag} {spec}: there is no file {path}")
    title = f"mooncake_user_{path.stem}"
    found = importlib.util.spec_from_file_location(title, path)
    assert found is not None and found.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(found)
    sys.modules[title] = module  # dataclasses look their module up by name
    found.loader.exec_module(module)
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and (name == wanted or (not wanted and value.__module__ == title))
    }
    able = [value for value in classes.values() if all(callable(getattr(value, method, None)) for method in methods)]
    if len(able) != 1:
        need = f"a class with {', '.join(methods)}"
        what = f"no {need} called {wanted}" if wanted else f"{len(able)} times {need}; say which with FILE.py:NAME"
        raise ValueError(f"{flag} {spec}: {path.name} has {what}")
    return able[0]


def _split(spec: str) -> tuple[str, str]:
    file, colon, wanted = spec.rpartition(":")
    return (file, wanted) if colon and file.endswith(".py") else (spec, "")
