"""The tiles of heads of 128: the shipped ones against the most promising others, a line for each kernel.

`scripts/bench.py tune-attention` tries all candidates of any row, and takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from attention.triton.tiles import Tile
from lab.bench.attention.tune import TABLE, own_capability
from lab.bench.attention.tuning import Target, candidates, compile_all, row_of, seconds_of, source_of, with_row
from lab.gpu.checks import Check, failed

CANDIDATES = 6
"""Per kernel: the section takes about a minute."""

JOBS = 8
GOAL = 0.98
"""The shipped tile is good enough if no other saves more than two per cent."""

chosen: dict[str, Tile] = {}
"""Kernels with a faster tile than the shipped one, after `measure`."""


def target() -> Target:
    return Target(128, torch.bfloat16, own_capability())


def measure() -> Iterator[Check]:
    own = target()
    for kind in own.kinds:
        fitting = [one.tile for one in compile_all(kind, own, near(kind, own), JOBS) if not one.problem]
        yield compared(kind, getattr(own.current, kind), fitting, partial(seconds_of, kind, own))


def near(kind: str, own: Target) -> list[Tile]:
    """The shipped tile, then those that differ from it in one number."""
    shipped, *others = candidates(kind, own)

    def changes(tile: Tile) -> int:
        return sum(getattr(tile, name) != getattr(shipped, name) for name in ("rows", "keys", "warps", "stages"))

    return [shipped, *sorted(others, key=changes)[: CANDIDATES - 1]]


def compared(kind: str, shipped: Tile, fitting: Sequence[Tile], seconds: Callable[[Tile], float]) -> Check:
    """The shipped tile's time against the fastest one's; remembers that one for `write` if it misses the goal."""
    if shipped not in fitting:
        return failed("tiles", kind, f"the shipped {source_of(shipped)} does not fit this GPU")
    times = {tile: seconds(tile) for tile in fitting}
    fastest = min(times, key=lambda tile: times[tile])
    check = Check(
        "tiles",
        f"{kind}, {source_of(shipped)} against the fastest of {len(times)}",
        "us",
        times[shipped] * 1e6,
        times[fastest] * 1e6,
        GOAL,
        lower_is_better=True,
        note=""
        if fastest == shipped
        else f"fastest: {source_of(fastest)}; gpu-check --write-tiles makes it the shipped one",
    )
    if check.verdict == "SHORT":
        chosen[kind] = fastest
    return check


def write() -> None:
    """Put the tiles of `chosen` into attention/triton/tiles.py."""
    own = target()
    if chosen:
        tiles = replace(own.current, **chosen)
        TABLE.write_text(with_row(TABLE.read_text(), own, row_of(own, tiles)))
        print(f"written: {TABLE}; now run scripts/test tests/attention")
