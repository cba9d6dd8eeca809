"""Computes the shortlist of a view in one compiled pass: cheapest.c, compiled on first use into the user's cache.

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
MAX_WIDTH = 256
"""Maximum width of a shortlist in C; numpy sorts a wider one faster."""

MAX_EXTRA_NODES = 8
"""Maximum number of nodes that a shortlist has in addition to the cheapest ones."""

_library: ctypes.CDLL | None = None
_chosen = (ctypes.c_int64 * (MAX_WIDTH + MAX_EXTRA_NODES))()
_out = ctypes.addressof(_chosen)


def prepare() -> None:
    """Use the C code from now on; the first call compiles it in 0.5 s. Raises net.compiled.NotCompiled."""
    global _library
    library = compiled.library(SOURCE)
    real, whole, pointer = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p
    library.shortlist.restype = whole
    library.shortlist.argtypes = [pointer, pointer, real, real, real, whole, whole, real, pointer]
    _library = library


def shortlist(now: float, demand: Demand, view: View, matched: Vector, width: int, seed: float) -> list[int] | None:
    """MooncakePlacement.shortlist without the pool; `seed` in [0, 1) seeds the draws. Returns None if `prepare` was not
    called or `width` exceeds MAX_WIDTH. Call it from one thread only: the buffer is shared."""
    if _library is None or width > MAX_WIDTH:
        return None
    has = None
    if matched is not view.none:
        if not matched.flags.c_contiguous:
            return None
        has = matched.__array_interface__["data"][0]  # takes half as long as matched.ctypes
    count = _library.shortlist(
        view.address, has, now, demand.num_tokens, demand.block_size, demand.num_blocks, width, seed, _out
    )  # fmt: skip
    return _chosen[:count]
