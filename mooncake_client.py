"""The client of the pooled store, for other programs: `from mooncake_client import Store`.

cache/store/client.py says what it does. This module only finds it: it puts the folder of our rooms on the path while it
imports the client, and takes it off again, so that a later `import sched` gives the standard library's.
"""

from __future__ import annotations

import sys
from pathlib import Path

_here = Path(__file__).resolve().parent
_rooms = str(_here / "mooncake_rooms" if (_here / "mooncake_rooms").is_dir() else _here)
for _name in ("cache", "net"):
    _file = getattr(sys.modules.get(_name), "__file__", None)
    if _name in sys.modules and not str(_file).startswith(_rooms):
        raise ImportError(f"this program has a module named {_name} already ({_file}); import mooncake_client first")

sys.path.insert(0, _rooms)
try:
    from cache.store.client import Exists, NoRoom, NotDurable, Store, StoreError, Unreachable
finally:
    sys.path.remove(_rooms)

__all__ = ["Exists", "NoRoom", "NotDurable", "Store", "StoreError", "Unreachable"]
