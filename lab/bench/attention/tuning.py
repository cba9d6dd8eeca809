"""Candidates for a row of attention/triton/tiles.py: which compile without spills, and which is fastest on a GPU."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from attention.triton import aot
from attention.triton.backend import TritonBackend
from attention.triton.tiles import KIB, SM80, SM86, SM90, Tile, Tiles, find_tiles
from lab.bench.attention.cases import Case, Shape, batch_of, tensors_of
from lab.bench.attention.timing import median_seconds

CAPABILITIES = {80: SM80, 86: SM86, 90: SM90}
NAMES = {SM80: "SM80", SM86: "SM86", SM90: "SM90"}
KINDS = ("decode", "prefill", "long")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BLOCK_SIZES = {"decode": 16, "prefill": 16, "long": 128}
CASES = {
    "decode": ((1, 8192, 1), (32, 4096, 1), (128, 1024, 1)),
    "prefill": ((1, 8192, 1024), (1, 8192, 2048), (1, 8192, 8192)),
    "long": ((1, 8192, 1024), (1, 8192, 2048), (1, 8192, 8192)),
}
"""(requests, context, chunk) that a tile is timed at; the geometric mean of the times decides."""


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the table."""

    head_size: int
    dtype: torch.dtype
    capability: int

    @property
    def shared_bytes(self) -> int:
        return CAPABILITIES[self.capability]

    @property
    def key(self) -> str:
        """The key as written in attention/triton/tiles.py."""
        return f"({self.head_size}, {self.dtype.itemsize}, {NAMES[self.shared_bytes]})"

    @property
    def current(self) -> Tiles:
        return find_tiles(self.head_size, self.dtype.itemsize, self.shared_bytes)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of KINDS that the row has a tile for."""
        return tuple(kind for kind in KINDS if getattr(self.current, kind) is not None)

    def with_tile(self, kind: str, tile: Tile) -> Tiles:
        """The row with another tile, for a backend that uses it: while one of prefill is tried, no chunk is long."""
        tiles: Tiles = replace(self.current, **{kind: tile})
        return replace(tiles, long=None) if kind == "prefill" else tiles


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiler's report on a candidate; `problem` is empty if it may be shipped."""

    tile: Tile
    problem: str
    registers: int = 0
    shared_bytes: int = 0


def candidates(kind: str, target: Target) -> list[Tile]:
    """The shipped tile first, then all promising ones."""
    shipped: Tile = getattr(target.current, kind)
    half = target.dtype.itemsize == 2
    keys = (16, 32, 64, 128) if half else (16, 32)
    rows = {"decode": (shipped.rows,), "prefill": (64, 128) if half else (16, 32, 64), "long": (shipped.rows,)}[kind]
    stages = (2, 3, 4, 5) if half else (2, 3)
    # Of a long one, four warps become two groups of four and one that copies.
    warps: tuple[int, ...] = (4,) if kind == "long" else (4, 8)
    keys = (64, 128) if kind == "long" else keys
    tried = [
        replace(shipped, rows=r, keys=k, warps=w, stages=s)
        for r, k, w, s in itertools.product(rows, keys, warps, stages)
    ]
    return list(dict.fromkeys([shipped, *tried]))


def compile_one(kind: str, target: Target, tile: Tile) -> Compiled:
    """Compile the kernel of `kind` for the target, as the backend launches it; needs no GPU."""
    case = Case(Shape("tune", 32, 8, target.head_size), 2, 2048, 1 if kind == "decode" else 2048)
    batch, num_blocks = batch_of(case, BLOCK_SIZES[kind], "meta")
    q, kv = (tensor.to(target.dtype) for tensor in tensors_of(case, num_blocks, BLOCK_SIZES[kind], "meta"))
    backend = TritonBackend(tiles=target.with_tile(kind, tile))
    launches = aot.record(lambda: backend.attend(q, kv, batch, backend.plan(batch), 1.0))
    (launch,) = (launch for launch in launches if launch.kernel.fn.__name__ == f"{kind}_kernel")
    try:
        used = aot.resources(launch, target.capability)
    except Exception as error:  # the compiler and the assembler raise many types; the candidate is rejected
        return Compiled(tile, f"does not compile: {type(error).__name__}")
    return Compiled(tile, problem_of(used, target), used.registers, used.shared_bytes)


def problem_of(used: aot.Resources, target: Target) -> str:
    if used.spill_bytes:
        return f"spills {used.spill_bytes} bytes"
    if used.shared_bytes > target.shared_bytes:
        return f"{used.shared_bytes / KIB:.0f} KiB of shared memory, {target.shared_bytes / KIB:.0f} there are"
    return ""


def compile_all(kind: str, target: Target, tiles: Iterable[Tile], jobs: int) -> Iterator[Compiled]:
    """Compiles in `jobs` processes; yields in order."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(compile_one, kind, target), tiles)


def seconds_of(kind: str, target: Target, tile: Tile) -> float:
    """Geometric mean of the seconds over CASES, on this GPU."""
    logarithms = [math.log(time_case(case, target, kind, tile)) for case in cases_of(kind, target)]
    return math.exp(sum(logarithms) / len(logarithms))


def cases_of(kind: str, target: Target) -> list[Case]:
    shape = Shape("tune", 32, 8, target.head_size)
    return [Case(shape, requests, context, chunk) for requests, context, chunk in CASES[kind]]


def time_case(case: Case, target: Target, kind: str, tile: Tile) -> float:
    batch, num_blocks = batch_of(case, BLOCK_SIZES[kind], "cuda")
    backend = TritonBackend(tiles=target.with_tile(kind, tile))
    plan = backend.plan(batch)

    def call(q: Tensor, kv: Tensor) -> Callable[[], object]:
        return lambda: backend.attend(q, kv, batch, plan, case.shape.head_size**-0.5)

    inputs = (tensor.to(target.dtype) for tensor in tensors_of(case, num_blocks, BLOCK_SIZES[kind], "cuda"))
    seconds: float = median_seconds([call(*inputs)])
    return seconds


def row_of(target: Target, tiles: Tiles) -> str:
    """The line of attention/triton/tiles.py."""
    shown = [source_of(tile) for tile in (tiles.decode, tiles.prefill, tiles.long) if tile is not None]
    return f"    {target.key}: Tiles({', '.join(shown)}),"


def source_of(tile: Tile) -> str:
    parts = [str(value) for value in (tile.rows, tile.keys, tile.warps, tile.stages)]
    if tile.min_chunk != Tile.__dataclass_fields__["min_chunk"].default:
        parts.append(f"min_chunk={tile.min_chunk}")
    if tile.precision != Tile.__dataclass_fields__["precision"].default:
        parts.append(f'precision="{tile.precision}"')
    if tile.persistent:
        parts.append("persistent=True")
    return f"Tile({', '.join(parts)})"


def with_row(source: str, target: Target, row: str) -> str:
    """The text of attention/triton/tiles.py with the target's row replaced, or added after the last one."""
    mine = re.compile(rf"^    {re.escape(target.key)}: Tiles\(.*\),$", re.MULTILINE)
    if mine.search(source):
        return mine.sub(lambda _: row, source)
    last = list(re.finditer(r"^    \(\d+, \d+, SM\d+\): Tiles\(.*\),$", source, re.MULTILINE))[-1]
    return f"{source[: last.end()]}\n{row}{source[last.end() :]}"
