"""Loads a class from a user's file: `--eviction mine.py:NAME`, and every other flag that takes FILE.py:NAME.

FILE.py:NAME is the class NAME in the file, or the function NAME that makes the object. FILE.py alone is the only class
in that file that has all the methods. The file is Python and runs in this process with its rights: name only files
that you would run yourself. The path comes only from the command line; network input never reaches this module.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def is_file(spec: str) -> bool:
    """True if `spec` names a file: 'mine.py', 'dir/mine.py:NAME'."""
    return _split(spec)[0].endswith(".py")


def load(flag: str, spec: str, methods: Sequence[str]) -> Callable[..., Any]:
    """The class, or a function with the same arguments as the file's function; its objects have all `methods`. Both
    raise ValueError that names `flag` and the mistake. Exceptions of the file's own code pass through."""
    file, name = _split(spec)
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"{flag} {spec}: there is no file {path}")
    module = _run(path)
    maker = getattr(module, name, None) if name else _only_class(module, f"{flag} {spec}", methods)
    if not callable(maker):
        raise ValueError(f"{flag} {spec}: {path.name} has no class or function {name!r}")

    if isinstance(maker, type):
        made: Callable[..., Any] = _able(maker, f"{flag} {spec}", methods)
        return made
    return lambda *args: _able(maker(*args), f"{flag} {spec}", methods)


def chosen(flag: str, name: str, built_in: Mapping[str, Callable[..., T]], methods: Sequence[str]) -> Callable[..., T]:
    """The maker `name` of `built_in`, or the user's (see `load`). Raises ValueError that names `flag`."""
    if is_file(name):
        return load(flag, name, methods)
    if name not in built_in:
        raise ValueError(f"{flag} must be one of {', '.join(built_in)}, or FILE.py:NAME, got {name!r}")
    return built_in[name]


def _split(spec: str) -> tuple[str, str]:
    file, colon, name = spec.rpartition(":")
    return (file, name) if colon and file.endswith(".py") else (spec, "")


def _run(path: Path) -> ModuleType:
    title = f"mooncake_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # dataclasses and triton look the module up by its name
    spec.loader.exec_module(module)
    return module


def _able(found: Any, what: str, methods: Sequence[str]) -> Any:
    if missing := [method for method in methods if not callable(getattr(found, method, None))]:
        raise ValueError(f"{what}: it lacks {', '.join(missing)}")
    return found


def _only_class(module: ModuleType, what: str, methods: Sequence[str]) -> Any:
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    found = [one for one in own if all(callable(getattr(one, method, None)) for method in methods)]
    if len(found) != 1:
        names = ", ".join(one.__name__ for one in found) or "none"
        raise ValueError(f"{what}: name the class with FILE.py:NAME; suitable classes in the file: {names}")
    return found[0]
