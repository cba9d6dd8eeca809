"""The rooms inside a program of others, under one name: mooncake_rooms.cache and so on.

The rooms have short names (cache, net, sched). Other packages, the standard library and the program itself may use the
same names. So only the rooms see one another under their short names, and sys.path stays as it is. In a wheel the rooms
lie in this folder; in a checkout they are three folders above it."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "mooncake_rooms"
ROOMS = ("cache", "connect", "net", "sched")
"""What a program of others may run. engine/ and lab/ belong to processes of our own."""


def _import(
    name: str,
    namespace: Mapping[str, object] | None = None,
    local: Mapping[str, object] | None = None,
    names: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """`__import__` as modules of the rooms see it: `cache` is mooncake_rooms.cache."""
    if level or name.partition(".")[0] not in ROOMS:
        return builtins.__import__(name, namespace, local, names or (), level)
    found = builtins.__import__(f"{PACKAGE}.{name}", namespace, local, names or (), 0)
    return found if names else getattr(found, name.partition(".")[0])  # `import cache.block` binds cache


_BUILTINS = {**vars(builtins), "__import__": _import}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = _BUILTINS  # where an import statement of the module looks for __import__
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        if package != PACKAGE or inner.partition(".")[0] not in ROOMS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


_here = Path(__file__).resolve().parent
__path__ = [str(_here if (_here / "cache").is_dir() else _here.parents[2])]
sys.meta_path.insert(0, _Finder())
