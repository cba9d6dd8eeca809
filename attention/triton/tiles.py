"""The tile table: the tile of one program, for every head size, element type and shared-memory size.

A fixed table replaces a search at run time. The same shapes give the same code in every run and on every node, and a
CUDA graph captures the code that the tests compiled. tests/attention/triton/test_triton_aot.py compiles every row ahead
of time, and checks that it spills no registers and stays within the row's shared memory.

The compiler's report chose the rows. It is not yet measured which rows are fastest on a GPU. Decode tiles keep about
64 KiB of keys and values in flight per program and, at 16 query rows, leave room for two programs on a multiprocessor.
Prefill tiles are the largest that neither spill nor exceed the shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

HEAD_SIZES = (64, 80, 96, 128, 256)
"""Head sizes that are tested; others up to 256 work if they are multiples of 16."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share."""

    rows: int  # query rows: tokens x heads (prefill); most heads (decode). A power of two, >= 16
    keys: int  # KV tokens per turn of the loop. A power of two, >= 16
    warps: int
    stages: int  # depth of the software pipeline: turns whose loads are in flight
    min_chunk: int = 256  # decode: merging a split shorter than this costs more time than it saves
    # The precision of float32 products. One pass of TF32 has 10 bits; three passes give float32 on tensor cores, but
    # take more registers than plain float32 ("ieee"). Half types ignore it.
    precision: str = "tf32x3"
    persistent: bool = False  # long chunks: a program computes several tiles of queries


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one device for one head size and element type."""

    decode: Tile
    prefill: Tile
    long: Tile | None = None  # on Hopper: long chunks over blocks of whole tiles of keys (attention/triton/hopper.py)

    @property
    def short(self) -> Tile:
        """Several queries against a split context: decode's tile. Before Hopper its warps hold the operands of their
        products, and masks of 64 rows would take too many registers."""
        return self.decode if self.long else replace(self.decode, rows=min(self.decode.rows, 32), warps=8)


KIB = 1024
SM86, SM80, SM90 = 99 * KIB, 163 * KIB, 227 * KIB
"""Shared memory that one program may use, bytes: consumer Ampere and Ada; A100; H100, H200 and B200."""

TABLE: dict[tuple[int, int, int], Tiles] = {
    # (maximum head size, bytes per element, minimum shared memory)
    (64, 2, SM90): Tiles(Tile(64, 128, 4, 4), Tile(128, 128, 8, 3), Tile(128, 128, 4, 3, persistent=True)),
    (64, 2, SM80): Tiles(Tile(64, 64, 4, 4), Tile(128, 64, 8, 3)),
    (64, 2, SM86): Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    (128, 2, SM90): Tiles(Tile(64, 64, 4, 4), Tile(128, 64, 8, 3), Tile(128, 128, 4, 2, persistent=True)),
    (128, 2, SM80): Tiles(Tile(64, 64, 4, 3), Tile(128, 32, 8, 4)),
    (128, 2, SM86): Tiles(Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)),
    (256, 2, SM90): Tiles(Tile(64, 32, 4, 4), Tile(128, 32, 8, 3), Tile(128, 64, 4, 2)),
    (256, 2, SM80): Tiles(Tile(32, 32, 4, 3), Tile(64, 32, 8, 3)),
    (256, 2, SM86): Tiles(Tile(32, 16, 4, 3), Tile(64, 16, 8, 3)),
    (64, 4, SM86): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
    (128, 4, SM86): Tiles(Tile(32, 32, 8, 2), Tile(16, 32, 8, 2)),
    (256, 4, SM86): Tiles(Tile(16, 16, 8, 2, precision="ieee"), Tile(16, 16, 8, 2, precision="ieee")),
}

OVER_CODES: dict[tuple[int, int, int], Tiles] = {
    (128, 2, SM80): replace(TABLE[128, 2, SM80], prefill=Tile(64, 64, 8, 3)),
    (256, 2, SM80): replace(TABLE[256, 2, SM80], prefill=Tile(64, 16, 8, 3)),
    (256, 2, SM86): replace(TABLE[256, 2, SM86], decode=Tile(16, 16, 4, 3)),
    (256, 4, SM86): replace(
        TABLE[256, 4, SM86],
        decode=Tile(16, 16, 8, 1, precision="ieee"),
        prefill=Tile(16, 16, 8, 1, precision="ieee"),
    ),
}
"""Rows for quantized pools: widening the codes takes registers, and the tiles of TABLE would need too many."""


def find_tiles(head_size: int, element_bytes: int, shared_bytes: int, quantized: bool = False) -> Tiles:
    """The row with the smallest sufficient head size and the most shared memory that the device has. element_bytes: of
    the queries; quantized: whether the pool is. Raises ValueError."""
    fits = [key for key in TABLE if key[0] >= head_size and key[1] == element_bytes and key[2] <= shared_bytes]
    if not fits or head_size % 16:
        raise ValueError(
            f"no tile for head size {head_size}, {element_bytes} bytes per element and {shared_bytes} bytes of shared "
            "memory in attention/triton/tiles.py; use --attention-backend torch"
        )
    row = min(fits, key=lambda key: (key[0], -key[2]))
    return OVER_CODES.get(row, TABLE[row]) if quantized else TABLE[row]
