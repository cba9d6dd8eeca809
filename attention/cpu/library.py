"""The compiled kernels and their arguments, mirroring paged.h field by field.

Every level (attention/cpu/level.py) has the same kernels; levels differ in the width of a vector and in the
multiplication of bfloat16. Tiles (amx) decode head sizes of 32, 64, 96 and 128 in blocks of a multiple of 16; others
use vdpbf16ps.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from attention.cpu import build
from attention.cpu.build import Recipe, load, require
from attention.cpu.level import LEVELS
from net.compiled import NotCompiled

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
POOL_DTYPES = DTYPES | {torch.int8: 3, torch.float8_e4m3fn: 4}
"""Quantized pools have the layout of attention/codes.py."""

FOLDER = Path(__file__).parent
"""Kernels include headers by their path from here."""

SOURCES = [FOLDER / name for name in ("decode/decode.cpp", "prefill/prefill.cpp", "rotary.cpp")]
# GCC 12's own intrinsics headers cause -Wuninitialized warnings; vectors wider than the CPU's never cross a function
# border.
FLAGS = ("-ffp-contract=fast", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi")


class Pool(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block", "kind", "head", "token")),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "block_size", "head_size", "dtype")),
    ]


class Attend(ctypes.Structure):
    _fields_ = [
        ("kv", Pool),
        *((name, ctypes.c_void_p) for name in ("q", "out", "lse", "sinks", "block_tables", "cu_q", "ctx_lens")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "table_row")),
        *((name, ctypes.c_int32) for name in ("first", "last", "num_heads", "window", "threads", "dtype")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    ]


class Write(ctypes.Structure):
    _fields_ = [
        ("kv", Pool),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "slots")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_heads", "threads", "dtype")),
    ]


def is_compiled(level: str) -> bool:
    """Whether `library` finds the kernels of a level in the cache."""
    return build.is_compiled(*recipe(level))


def recipe(level: str) -> Recipe:
    """The arguments of `load` for the kernels of a level."""
    return f"attention-{level}", SOURCES, LEVELS[level], FLAGS, [FOLDER]


@functools.cache
def library(level: str) -> ctypes.CDLL:
    """The kernels of a level. Raises NotCompiled for missing features, no compiler, or tile registers that the
    operating system refuses."""
    require(LEVELS[level])
    compiled = load(*recipe(level))
    for function in (compiled.mooncake_decode, compiled.mooncake_prefill, compiled.mooncake_write):
        function.argtypes, function.restype = [ctypes.c_void_p], None  # the address of an Attend or a Write
    if level == "amx" and compiled.mooncake_request_amx() != 0:
        raise NotCompiled("the operating system does not grant the AMX tile registers")
    return compiled
