"""collectives.c as Python sees it: the state of a group, mirroring turns.h field by field, and the calls."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from net import compiled

FOLDER = Path(__file__).parent
MOST = 64
HEAD_BYTES = 4096
OK, CHANGED, MISMATCH = 0, 1, 2


class Group(ctypes.Structure):
    """The state of one rank's group, in its own memory."""

    _fields_ = [
        ("size", ctypes.c_int32),
        ("me", ctypes.c_int32),
        ("epoch", ctypes.c_uint32),
        ("phase", ctypes.c_uint32),
        ("stage_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("yields", ctypes.c_int32),
        ("culprit", ctypes.c_int32),
        ("call", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("stopped", ctypes.c_int64),
        ("moved_ns", ctypes.c_int64),
        ("segments", ctypes.c_void_p * MOST),
    ]


_P, _I, _L, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_CALLS = {
    "mc_enter": (None, [_P]),
    "mc_late": (_U, [_P]),
    "mc_reduce_buffers": (_I, [_P, _P, _I, _L, _I, _I]),
    "mc_barrier": (_I, [_P, _U]),
    "mc_all_reduce": (_I, [_P, _U, _P, _P, _L, _I, _I, _I]),
    "mc_reduce": (_I, [_P, _U, _P, _P, _L, _I, _I, _I]),
    "mc_reduce_scatter": (_I, [_P, _U, _P, _P, _L, _I, _I]),
    "mc_gather": (_I, [_P, _U, _P, _P, _L, _I]),
    "mc_broadcast": (_I, [_P, _U, _P, _L, _I]),
    "mc_all_to_all": (_I, [_P, _U, _P, _P, _P, _P]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The calls; each lets other threads of Python run. Compiling takes seconds, once per machine and version. Raises
    NotCompiled."""
    headers = [FOLDER / name for name in ("turns.h", "reduce.h", "reduce_type.h")]
    loaded = compiled.library(FOLDER / "collectives.c", headers, for_this_cpu=True)
    for name, (result, arguments) in _CALLS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
