"""Every row of the tile table computes what it should, in every type of its size and over codes. Compiling a row ahead
of time (tests/attention/triton) shows that it fits a GPU, not that it is right."""

from __future__ import annotations

import pytest
import torch

from attention.codes import DTYPES as CODES
from attention.triton.backend import TritonBackend
from attention.triton.tiles import OVER_CODES, TABLE, Tiles
from lab.bench.attention.grid import LONG, Point, find_fault
from lab.bench.attention.quantized import find_quantized_fault
from tests.attention.interpreted.cases import DEVICE

BY_BYTES = {2: (torch.bfloat16, torch.float16), 4: (torch.float32,)}
LIGHT = {(64, 2), (128, 4)}
"""(head size, bytes per element) whose first type is not heavy: a row takes seconds interpreted."""


def rows() -> list[object]:
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


@pytest.mark.parametrize(("tiles", "size", "dtype", "kv_dtype"), rows())
def test_a_row_of_the_table(
    tiles: Tiles, size: int, dtype: torch.dtype, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two splits of a decode, and a chunk of more rows than a tile, whose keys end inside a tile."""
    chunk = tiles.prefill.rows // 2 + 3
    monkeypatch.setitem(LONG, "two tiles", [(1, tiles.decode.min_chunk + tiles.decode.keys + 5), (chunk, 37)])
    point = Point("two tiles", 2, 1, size, 16, dtype)
    backend = TritonBackend(tiles=tiles)
    if kv_dtype:
        assert find_quantized_fault(backend, point, kv_dtype, DEVICE) is None
    else:
        assert find_fault(backend, point, DEVICE) is None
