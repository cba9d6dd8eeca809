"""rounds.c as Python sees it: the description of a dispatch, mirrored field by field, and the calls."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from net import compiled

FOLDER = Path(__file__).parent
MOST_RANKS = 64
MOST_HIDDEN = 65536

Calls = dict[str, tuple[Any, list[Any]]]
_P, _I, _L, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64


class Dispatch(ctypes.Structure):
    """The rows of one round: rounds.c has the shapes."""

    _fields_ = [
        ("x", _P),
        ("chosen", _P),
        ("weights", _P),
        ("table", _P),
        ("counts", _P),
        ("sent", _P),
        ("desks", _P * MOST_RANKS),
        ("tokens", _P * MOST_RANKS),
        ("rows", _L * MOST_RANKS),
        ("pairs", _L * MOST_RANKS),
        ("num_tokens", _L),
        ("hidden", _L),
        ("top_k", _L),
        ("columns", _L),
        ("slots", _L),
        ("ranks", _L),
        ("first", _L),
        ("at_scales", _L),
        ("at_pair_rows", _L),
        ("at_pair_slots", _L),
        ("at_pair_weights", _L),
        ("type", _I),
        ("coded", _I),
        ("own", _L),
    ]


class Heart(ctypes.Structure):
    """The thread that beats for a process."""

    _fields_ = [("desk", _P), ("period_ns", _L), ("stop", ctypes.POINTER(ctypes.c_int32))]


_WAITS: Calls = {
    "mr_await_message": (_U, [_P, _L, _I, _L]),
    "mr_await_answers": (_U, [_P, _I, _P, _L, _I, _L]),
    "mr_dispatch": (None, [_P]),
    "mr_decode": (None, [_P, _P, _P, _L, _L, _I, _I]),
    "mr_combine": (None, [_P, _P, _P, _P, _I]),
    "mr_beat": (_I, [_P, _P]),
    "mr_stop": (None, [_P, _P]),
}
_SHORT: Calls = {
    "mr_ask": (None, [_P, _U]),
    "mr_answer": (None, [_P, _P, _U]),
    "mr_message_landed": (None, [_P]),
    "mr_answer_landed": (None, [_P]),
    "mr_asked": (_U, [_P]),
    "mr_answered": (_U, [_P]),
    "mr_beats": (_U, [_P]),
    "mr_live": (None, [_P]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The calls that take long: each lets other threads of Python run. Compiling takes a second, once per machine and
    version. Raises NotCompiled."""
    headers = [FOLDER / name for name in ("bell.h", "rows.h", "lanes.h")]
    return typed(compiled.library(FOLDER / "rounds.c", headers, for_this_cpu=True), _WAITS)


@functools.cache
def short() -> ctypes.CDLL:
    """The calls that take less than a microsecond."""
    return typed(compiled.held(library()), _SHORT)


def typed(loaded: ctypes.CDLL, calls: Calls) -> ctypes.CDLL:
    for name, (result, arguments) in calls.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
