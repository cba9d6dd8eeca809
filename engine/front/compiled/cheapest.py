"""Computes the shortlist of a view in one compiled pass: cheapest.c, compiled on first use into the user's cache.

numpy and lists do the same in two dozen steps (sched/placement/mooncake.py), three times slower for 1,000 nodes; a
machine without a C compiler uses them. The tests hold them together.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from net import compiled
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.view import View

SOURCE = Path(__file__).with_name("cheapest.c")
MAX_WIDTH = 256
"""Maximum number of cheapest nodes among which C draws; numpy sorts more faster. A draw among all nodes needs no
order."""

MAX_CHOSEN = 32
"""Maximum length of a shortlist, see cheapest.c."""

KEPT_ADDRESSES = 64
"""Columns whose address is remembered. Prompts with a common prefix have the same column of matches."""

_library: ctypes.CDLL | None = None
_chosen = (ctypes.c_int64 * MAX_CHOSEN)()
_out = ctypes.addressof(_chosen)
_addresses: dict[int, tuple[Vector, int]] = {}  # by id; the column is kept, so that no other one gets its id


def prepare() -> None:
    """Use the C code from now on; the first call compiles it in 0.5 s. Raises net.compiled.NotCompiled."""
    global _library
    library = compiled.held(compiled.library(SOURCE))
    real, whole, pointer = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p
    library.shortlist.restype = whole
    library.shortlist.argtypes = [pointer, pointer, real, whole, whole, whole, real, real, pointer]
    _library = library


def shortlist(now: float, demand: Demand, view: View, matched: Vector, seed: float) -> list[int] | None:
    """MooncakePlacement.shortlist without the pool; `seed` in [0, 1) seeds the draws. Returns None if `prepare` was not
    called, or if the draw is among more than the MAX_WIDTH cheapest nodes, but not among all. Call it from one thread
    only: the buffer is shared."""
    if _library is None:
        return None
    column = None if matched is view.none else _addresses.get(id(matched)) or _addressed(matched)
    has = None if column is None else column[1]
    count = _library.shortlist(
        view.address, has, now, demand.num_tokens, demand.num_blocks, demand.block_size, view.expected_arrivals, seed,
        _out,
    )  # fmt: skip
    return _chosen[:count] if count >= 0 else None


def _addressed(matched: Vector) -> tuple[Vector, int]:
    """(the column, contiguous, and the address of its data), which numpy takes 1 us to tell."""
    if len(_addresses) >= KEPT_ADDRESSES:
        _addresses.clear()
    column = np.ascontiguousarray(matched)
    found = column, int(column.ctypes.data)
    if column is matched:
        _addresses[id(matched)] = found
    return found
