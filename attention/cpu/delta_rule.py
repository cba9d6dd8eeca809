"""The gated delta rule in C++ on states in the pool (attention/delta_states.py): delta/step.cpp and delta/chunk.cpp.

States are read and written where they lie. Everything is computed in float32, at every level; outputs are rounded once.

Threads: torch.get_num_threads() at each call, in torch's own OpenMP pool.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attention.cpu.build import Recipe, load
from attention.cpu.level import LEVELS
from attention.cpu.library import DTYPES, FLAGS, FOLDER
from attention.delta_states import Tokens, check
from attention.states import Place, StateSlots

SOURCES: list[Path] = [FOLDER / "delta" / name for name in ("step.cpp", "chunk.cpp")]


class Delta(ctypes.Structure):
    """`Delta` of delta/delta.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "decay", "rate", "out", "memory", "pieces")),
        *((name, ctypes.c_void_p) for name in ("read", "write", "fresh")),
        *((name, ctypes.c_int64) for name in ("q_row", "k_row", "v_row", "block", "groups")),
        *((name, ctypes.c_int32) for name in ("rows", "key_heads", "value_heads", "key_size", "value_size")),
        *((name, ctypes.c_int32) for name in ("by_channel", "dtype", "threads")),
    ]


def recipe(level: str) -> Recipe:
    """The arguments of `load` for the kernels of a level."""
    return f"delta-{level}", SOURCES, LEVELS[level], FLAGS, [FOLDER]


@functools.cache
def delta_library(level: str) -> ctypes.CDLL:
    """The kernels of a level of attention/cpu/level.py. Raises NotCompiled."""
    compiled = load(*recipe(level))
    for function in (compiled.mooncake_delta_step, compiled.mooncake_delta_chunk):
        function.argtypes, function.restype = [ctypes.c_void_p], None  # the address of a Delta
    return compiled


class CpuRule:
    """float32, bfloat16 and float16; any number and size of heads."""

    name = "cpu"

    def __init__(self, level: str) -> None:
        """Raises NotCompiled."""
        self.library = delta_library(level)

    def step(self, tokens: Tokens, place: Place, read: Tensor, fresh: Tensor, write: Tensor, out: Tensor) -> None:
        if len(read) != len(tokens.v):
            raise ValueError(f"{len(tokens.v)} tokens of {len(read)} requests: a step has one of each")
        self._call(self.library.mooncake_delta_step, tokens, place, read, fresh, write, out)

    def chunk(
        self, tokens: Tokens, place: Place, read: Tensor, fresh: Tensor | None, write: Tensor, out: Tensor
    ) -> None:
        if len(read) != 1:
            raise ValueError(f"a chunk is of one request, not of {len(read)}")
        self._call(self.library.mooncake_delta_chunk, tokens, place, read, fresh, write, out)

    def _call(
        self,
        function: Callable[[int], None],
        tokens: Tokens,
        place: Place,
        read: Tensor,
        fresh: Tensor | None,
        write: Tensor,
        out: Tensor,
    ) -> None:
        check(tokens, place, read, write, out)
        if out.device.type != "cpu" or out.dtype not in DTYPES or place.memory.dtype != torch.float32:
            raise ValueError(
                f"the cpu backend has no delta rule for {out.dtype} on {out.device}; choose --attention-backend torch"
            )
        q, k, v = (_with_heads_side_by_side(x) for x in (tokens.q, tokens.k, tokens.v))
        decay, rate = tokens.decay.float().contiguous(), tokens.rate.float().contiguous()
        read, write, pieces = read.contiguous(), write.contiguous(), pieces_of(place.slots)
        fresh = None if fresh is None else fresh.contiguous()
        call = Delta(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            decay=decay.data_ptr(),
            rate=rate.data_ptr(),
            out=out.data_ptr(),
            memory=place.memory.data_ptr(),
            pieces=pieces.data_ptr(),
            read=read.data_ptr(),
            write=write.data_ptr(),
            fresh=None if fresh is None else fresh.data_ptr(),
            q_row=q.stride(0),
            k_row=k.stride(0),
            v_row=v.stride(0),
            block=place.memory.stride(0),
            groups=read.shape[1],
            rows=len(v),
            key_heads=k.shape[1],
            value_heads=v.shape[1],
            key_size=k.shape[2],
            value_size=v.shape[2],
            by_channel=decay.dim() == 3,
            dtype=DTYPES[out.dtype],
            threads=torch.get_num_threads(),
        )
        function(ctypes.addressof(call))


def _with_heads_side_by_side(x: Tensor) -> Tensor:
    """x [T, heads, size], copied if its heads lie otherwise."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@functools.lru_cache(maxsize=256)
def pieces_of(slots: StateSlots) -> Tensor:
    """[num_pieces, 3] int64: `Piece` of delta/delta.h."""
    return torch.tensor(slots.pieces)
