"""Computes the choice among a few nodes in two compiled passes: choose.c, compiled on first use into the user's cache.

Plain Python does the same in a loop over the nodes (sched/placement/few.py); a machine without a C compiler uses that.
The tests hold them together.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from struct import Struct

from net import compiled
from sched.placement.demand import Demand
from sched.placement.few import MAX_FEW_NODES, Drawn, Found, find_few
from sched.placement.links import Paths, Vector
from sched.placement.view import View

SOURCE = Path(__file__).with_name("choose.c")
QUESTION, ANSWER = Struct("13d"), Struct("8d")
Able = ctypes.c_int64 * MAX_FEW_NODES

_library: ctypes.CDLL | None = None
_place = (ctypes.c_char * (QUESTION.size + ANSWER.size))()
_able = Able()


def prepare() -> None:
    """Use the C code from now on; the first call compiles it in 0.5 s. Raises net.compiled.NotCompiled."""
    global _library, _place, _able
    library = compiled.held(compiled.library(SOURCE))
    node, numbers = ctypes.c_int64, ctypes.c_char_p
    library.choose_place.restype = ctypes.c_void_p
    library.choose_prefill.restype = library.choose_decode.restype = node
    library.choose_prefill.argtypes = [numbers] * 3
    library.choose_decode.argtypes = [*[numbers] * 3, node, numbers]
    library.choose_estimates.restype = None
    library.choose_estimates.argtypes = [*[numbers] * 3, node, node, numbers]
    at = library.choose_place()
    _place, _able = type(_place).from_address(at), Able.from_address(at + ctypes.sizeof(_place))
    _library = library


def find(
    now: float,
    demand: Demand,
    view: View,
    table: bytes,
    matched: Vector,
    threshold: float,
    fetched: Paths,
    drawn: Drawn,
) -> Found | None:
    """find_few of sched/placement/few.py, compiled if `prepare` was called. Call it from one thread only: the place of
    the question is shared."""
    library = _library
    if library is None:
        return find_few(now, demand, view, table, matched, threshold, fetched, drawn)
    QUESTION.pack_into(
        _place, 0, len(view.ids), now, demand.num_tokens, demand.max_tokens, demand.pool_tokens, demand.block_size,
        threshold, demand.fetch_token_bytes, demand.ssd_s, demand.handover_token_bytes, bool(fetched),
        demand.dram_tokens, demand.other_blocks,
    )  # fmt: skip
    own, into = matched.tobytes(), fetched.tobytes()
    count = library.choose_prefill(table, own, into)
    if not count:
        return None
    source = _able[0] if count == 1 else drawn(_able[:count])
    handed_over = view.handover_each(view.ids[source])
    out_of = handed_over.tobytes()
    count = library.choose_decode(table, own, into, source, out_of)
    if count == 1:
        target = _able[0]
    else:
        target = drawn(_able[:count])
        library.choose_estimates(table, own, into, source, target, out_of)
    return (source, target, handed_over, *ANSWER.unpack_from(_place, QUESTION.size))
