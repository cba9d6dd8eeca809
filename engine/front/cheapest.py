"""A shortlist of a view in one compiled pass: cheapest.c, compiled on first use into the user's cache.

numpy and lists do the same in two dozen steps (sched/placement/mooncake.py), three times slower for 1,000 nodes; a
machine without a C compiler uses them. The tests hold them together.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from net import compiled
from sched.placement.demand import Demand
from sched.placement.links import Vector
from sched.placement.view import View

SOURCE = Path(__file__).with_name("cheapest.c")
MOST_WIDTH = 256
"""A wider shortlist is sorted faster by numpy."""

MOST_BESIDE = 8
"""Nodes of a shortlist beside the cheapest, at most."""

_library: ctypes.CDLL | None = None
_chosen = (ctypes.c_int64 * (MOST_WIDTH + MOST_BESIDE))()
_out = ctypes.addressof(_chosen)


def prepare() -> None:
    """Use the C code from now on; compiles it if need be, half a second. Raises net.compiled.NotCompiled."""
    global _library
    library = compiled.library(SOURCE)
    real, whole, pointer = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p
    library.shortlist.restype = whole
    library.shortlist.argtypes = [pointer, pointer, real, real, real, whole, whole, real, pointer]
    _library = library


def shortlist(now: float, demand: Demand, view: View, matched: Vector, width: int, seed: float) -> list[int] | None:
    """MooncakePlacement.shortlist with no pool counted; `seed`, in [0, 1), draws. None: not prepared, or wider than
    MOST_WIDTH. Of one thread: the buffer is shared."""
    if _library is None or width > MOST_WIDTH:
        return None
    has = None
    if matched is not view.none:
        if not matched.flags.c_contiguous:
            return None
        has = matched.__array_interface__["data"][0]  # half the time of matched.ctypes
    count = _library.shortlist(
        view.address, has, now, demand.num_tokens, demand.block_size, demand.num_blocks, width, seed, _out
    )  # fmt: skip
    return _chosen[:count]
