"""The client of the pooled store, for other programs: `from mooncake_client import Store`.

cache/store/client.py says what it does, and connect/site/mooncake_rooms/ how the rooms stay out of the way of other
packages with such short names.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

PACKAGE = "mooncake_rooms"

if TYPE_CHECKING:
    from cache.store.client import Exists, NoRoom, NotDurable, Store, StoreError, Unreachable
else:
    _rooms = Path(__file__).resolve().parent / "connect" / "site" / PACKAGE
    if PACKAGE not in sys.modules and _rooms.is_dir():  # a checkout, where it is not next to this file
        _spec = spec_from_file_location(PACKAGE, _rooms / "__init__.py", submodule_search_locations=[str(_rooms)])
        sys.modules[PACKAGE] = module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[PACKAGE])
    from mooncake_rooms.cache.store.client import Exists, NoRoom, NotDurable, Store, StoreError, Unreachable

__all__ = ["Exists", "NoRoom", "NotDurable", "Store", "StoreError", "Unreachable"]
