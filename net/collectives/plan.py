"""Decides how a collective call runs: which algorithm, how long a rank spins, what may be reduced. Pure.

Bytes that a rank moves in an all_reduce of N bytes over n ranks of one host: direct, N copied and n N read, with one
wait; in two steps, 3 N, with two waits. A wait costs microseconds if the others run, and tens of them if a sleeping
rank has to be woken. So small calls are direct, and more ranks mean an earlier change.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool")
"""The types that can be reduced, in the order of reduce.h. Calls that only move bytes take any type."""

WIDTHS = dict(zip(DTYPES, (4, 8, 2, 2, 1, 1, 2, 4, 8, 1), strict=True))
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
FLOATS = frozenset({"float32", "float64", "float16", "bfloat16"})
MOST_RANKS = 64
DIRECT_BYTES = 128 << 10  # read by each rank from the others' stages
SPIN_NS, SHARED_CORE_SPIN_NS = 50_000, 20_000


def check_reduction(dtype: str, op: str) -> None:
    """Raises ValueError for what has no meaning or no code."""
    if dtype not in DTYPES:
        raise ValueError(f"tensors of {dtype} cannot be reduced; these can: {', '.join(DTYPES)}")
    if op not in OPS:
        raise ValueError(f"no reduction is called {op!r}; these are: {', '.join(OPS)}")
    if op == "avg" and dtype not in FLOATS:
        raise ValueError(f"avg of {dtype}: a mean of integers is not an integer; sum them, or convert them to a float")
    if op in ("band", "bor", "bxor") and dtype in FLOATS:
        raise ValueError(f"{op} of {dtype}: only integers and bool have bits to combine")


def is_direct(nbytes: int, ranks: int) -> bool:
    """Whether every rank of an all_reduce reads everything, instead of one part and then the sums of the others."""
    return nbytes * (ranks - 1) <= DIRECT_BYTES


def spin_ns(ranks: int, cores: int) -> tuple[int, bool]:
    """How long a rank polls before it sleeps, and whether it offers its core to the others meanwhile."""
    return (SPIN_NS, False) if ranks <= cores else (SHARED_CORE_SPIN_NS, True)


@functools.lru_cache(4096)
def signature(kind: str, *facts: object) -> int:
    """A number that ranks compare at the start of a call: equal if they call the same, with the same sizes."""
    return int.from_bytes(hashlib.blake2b(repr((kind, facts)).encode(), digest_size=8).digest(), "little") >> 1


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each of several parts begins that lie one behind the other."""
    found, at = [], 0
    for size in sizes:
        found.append(at)
        at += size
    return found


def parts(nbytes: int, ranks: int, width: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the part of each rank: whole elements, and every part but the last a multiple of 64 bytes."""
    step = -(-nbytes // ranks)
    step = -(-step // (64 * width)) * 64 * width
    return [(min(i * step, nbytes), min(step, max(0, nbytes - i * step))) for i in range(ranks)]
