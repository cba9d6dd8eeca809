"""A backend from a file of the user's own: `--attention-backend mine.py` or `mine.py:Name`.

The file is Python and is run as part of this process, with its rights: name only files you would run yourself. It comes
from the command line only; nothing that arrives over the network reaches this module.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from attention.interface import AttentionBackend

METHODS = ("plan", "write_kv", "rotate_and_write_kv", "attend")


def is_file(name: str) -> bool:
    """True if `name` is meant as a file: 'mine.py', 'dir/mine.py:Name'."""
    return _split(name)[0].endswith(".py")


def load(name: str) -> AttentionBackend:
    """An instance of the class, or the result of the factory, called `Name` in the file; without a name, of the only
    class there that has all methods of a backend. Raises ValueError naming what is wrong with it."""
    file, wanted = _split(name)
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"--attention-backend {name}: there is no file {path}")
    module = _run(path)
    if wanted:
        maker = getattr(module, wanted, None)
        if not callable(maker):
            raise ValueError(f"--attention-backend {name}: {path.name} has no class or function {wanted!r}")
    else:
        maker = _only_backend(module, name)
    backend = maker()
    if missing := [method for method in METHODS if not callable(getattr(backend, method, None))]:
        raise ValueError(f"--attention-backend {name}: it lacks {', '.join(missing)} (see attention/interface.py)")
    if not isinstance(getattr(backend, "name", None), str):
        raise ValueError(f"--attention-backend {name}: it lacks a `name`, a string")
    loaded: AttentionBackend = backend
    return loaded


def _split(name: str) -> tuple[str, str]:
    file, colon, wanted = name.rpartition(":")
    return (file, wanted) if colon and file.endswith(".py") else (name, "")


def _run(path: Path) -> ModuleType:
    """The file as a module. What it raises is the user's and passes through."""
    title = f"attention_backend_{path.stem}"
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # dataclasses and triton look the module up by its name
    spec.loader.exec_module(module)
    return module


def _only_backend(module: ModuleType, name: str) -> Any:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and all(hasattr(value, method) for method in METHODS)
    ]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise ValueError(
            f"--attention-backend {name}: name the class with FILE.py:NAME; the file has these backends: {names}"
        )
    return found[0]
