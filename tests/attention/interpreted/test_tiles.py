"""Every row of the tile table computes what it should, in every type of its size and over codes. Compiling a row ahead
of time (tests/attention/triton) shows that it fits a GPU, not that it is right. test_hopper.py has its tiles of long
chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention.codes import DTYPES as CODES
from attention.triton import short
from attention.triton.backend import Limits, TritonBackend
from attention.triton.tiles import OVER_CODES, SM90, TABLE, Tiles
from lab.bench.attention.grid import LONG, Mix, Point, find_fault
from lab.bench.attention.quantized import find_quantized_fault
from tests.attention.interpreted.cases import DEVICE

BY_BYTES = {2: (torch.bfloat16, torch.float16), 4: (torch.float32,)}
LIGHT = {(64, 2), (128, 4)}
"""(head size, bytes per element) whose first type is not heavy: a row takes seconds interpreted."""


def rows() -> list[Any]:
    """(tiles, head size, type, KV in): every row of both tables in every type that it serves."""
    found = []
    for key, tiles in TABLE.items():
        size, nbytes, _ = key
        for number, dtype in enumerate(BY_BYTES[nbytes]):
            for kv_dtype in ("", *sorted(CODES)):
                light = not number and not kv_dtype and (size, nbytes) in LIGHT
                used = OVER_CODES.get(key, tiles) if kv_dtype else tiles
                found.append(
                    pytest.param(
                        used,
                        size,
                        dtype,
                        kv_dtype,
                        marks=[] if light else [pytest.mark.heavy],
                        id=f"{size}-{key[2]}-{str(dtype).removeprefix('torch.')}-{kv_dtype or 'floats'}",
                    )
                )
    return found


def check(tiles: Tiles, mix: Mix, size: int, dtype: torch.dtype, kv_dtype: str, limits: Limits | None = None) -> None:
    backend = TritonBackend(tiles=tiles, limits=limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LONG, "a row", mix)
        point = Point("a row", 2, 1, size, 16, dtype)
        if kv_dtype:
            assert find_quantized_fault(backend, point, kv_dtype, DEVICE) is None
        else:
            assert find_fault(backend, point, DEVICE) is None


@pytest.mark.parametrize(("tiles", "size", "dtype", "kv_dtype"), rows())
def test_a_row_of_the_table(
    tiles: Tiles, size: int, dtype: torch.dtype, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two splits of a decode, and a chunk of more rows than a tile, whose keys end inside a tile; then a draft against
    two splits."""
    two_splits = tiles.decode.min_chunk + tiles.decode.keys + 5
    check(tiles, [(5, two_splits)], size, dtype, kv_dtype)
    monkeypatch.setattr(short, "SHORT", 0)
    check(
        tiles, [(1, two_splits), (tiles.prefill.rows // 2 + 3, 37)], size, dtype, kv_dtype, Limits(SM90, 1, hopper=True)
    )
