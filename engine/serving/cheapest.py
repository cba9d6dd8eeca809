"""The cheapest prefill nodes of a view in one compiled pass: cheapest.c, compiled on first use into the user's cache.

numpy does the same in a dozen passes (sched/placements/costs.py, `ranking`), three times slower for 1,000 nodes; it is
what a machine without a C compiler uses. The tests hold them together.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from net import compiled
from sched.placements.demand import Demand
from sched.placements.links import Vector
from sched.placements.view import View

SOURCE = Path(__file__).with_name("cheapest.c")
MOST_WIDTH = 256
"""A wider shortlist is sorted faster by numpy."""

_library: ctypes.CDLL | None = None
_best = (ctypes.c_int64 * MOST_WIDTH)()
_costs = (ctypes.c_double * MOST_WIDTH)()
_holder = ctypes.c_int64()
_out = (ctypes.addressof(_best), ctypes.addressof(_costs), ctypes.addressof(_holder))


def prepare() -> None:
    """Use the C code from now on; compiles it if need be, half a second. Raises net.compiled.Unavailable."""
    global _library
    library = compiled.library(SOURCE)
    real, whole, pointer = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p
    library.cheapest.restype = whole
    library.cheapest.argtypes = [pointer, pointer, whole, real, real, real, whole, pointer, pointer, pointer]
    _library = library


def cheapest(
    now: float, demand: Demand, view: View, matched: Vector, width: int
) -> tuple[list[int], int | None] | None:
    """At most `width` nodes that can prefill the prompt, the cheapest first, no pool counted; and the node that has
    most of it, if any has some. None: not prepared, or more than MOST_WIDTH. Of one thread: the buffers are shared."""
    if _library is None or width > MOST_WIDTH:
        return None
    has = None
    if matched is not view.none:
        if not matched.flags.c_contiguous:
            return None
        has = matched.__array_interface__["data"][0]  # half the time of matched.ctypes
    count = _library.cheapest(
        view.address, has, len(view.ids), now, demand.num_tokens, demand.block_size, width, *_out
    )  # fmt: skip
    return _best[:count], _holder.value if _holder.value >= 0 else None
