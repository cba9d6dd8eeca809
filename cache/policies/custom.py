"""A policy from a file of the user's own: `--eviction mine.py:NAME`, `--cache-admission mine.py:NAME`.

The file is Python and is run as part of this process, with its rights: name only files you would run yourself. It comes
from the command line only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def is_file(name: str) -> bool:
    """True if `name` is meant as a file: 'mine.py:Name', 'dir/mine.py:Name'."""
    return name.rpartition(":")[0].endswith(".py") or name.endswith(".py")


def load(flag: str, name: str, methods: Sequence[str]) -> Callable[[], Any]:
    """The class, or the factory, called `Name` in the file of 'FILE.py:Name'; what it makes has `methods`. Raises
    ValueError naming what is wrong, and what running the file raises."""
    file, _, wanted = name.rpartition(":")
    if not file or not wanted:
        raise ValueError(f"{flag} {name}: name the class with FILE.py:NAME")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"{flag} {name}: there is no file {path}")
    title = f"cache_policy_{path.stem}"
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # dataclasses look the module up by its name
    spec.loader.exec_module(module)
    maker: Callable[[], Any] | None = getattr(module, wanted, None)
    if not callable(maker):
        raise ValueError(f"{flag} {name}: {path.name} has no class or function {wanted!r}")
    made = maker()
    if missing := [method for method in methods if not callable(getattr(made, method, None))]:
        raise ValueError(f"{flag} {name}: it lacks {', '.join(missing)} (see cache/policy.py)")
    return maker
