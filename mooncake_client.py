"""The client of the pooled store, for other programs: `from mooncake_client import Store`.

cache/store/client.py says what it does. Our rooms have short names (cache, net, sched). Other packages, the standard
library and the program itself may use the same names. So this module imports the rooms as mooncake_rooms.cache and so
on; only the rooms see one another under their short names. sys.path stays as it is.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

PACKAGE = "mooncake_rooms"
ROOMS = ("cache", "net", "sched")


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
        spec = PathFinder.find_spec(name, path, target) if name.startswith(f"{PACKAGE}.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


if TYPE_CHECKING:
    from cache.store.client import Exists, NoRoom, NotDurable, Store, StoreError, Unreachable
else:
    _here = Path(__file__).resolve().parent
    _package = ModuleType(PACKAGE)
    _package.__path__ = [str(_here / PACKAGE if (_here / PACKAGE).is_dir() else _here)]
    sys.modules[PACKAGE] = _package
    sys.meta_path.insert(0, _Finder())
    from mooncake_rooms.cache.store.client import Exists, NoRoom, NotDurable, Store, StoreError, Unreachable

__all__ = ["Exists", "NoRoom", "NotDurable", "Store", "StoreError", "Unreachable"]
