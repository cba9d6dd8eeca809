"""Attention kernels compiled without a GPU: the resources of a multiprocessor that they need.
The kernels are those of the benchmark's cases and of products with quantized weights, or of all tiles."""

from __future__ import annotations

from attention.triton import aot
from attention.triton.backend import TritonBackend
from attention.triton.tiles import find_tiles
from lab.bench.attention.cases import Case, batch_of, cases, tensors_of
from lab.bench.attention.every_tile import (
    BLOCKS,
    KERNELS,
    LLAMA,
    SHARED_BYTES,
    attention_launches,
    every_pair,
    shortfall,
)
from lab.bench.attention.quantized_products import every_product
from lab.bench.common.results import Row

REGISTERS = 255
"""Maximum registers of a thread; more spill."""


def compiled_rows(capability: int, block_size: int, quick: bool) -> list[Row]:
    """Registers, spills and shared memory of every kernel that the cases and products with quantized weights launch."""
    rows, seen = [], set()
    for case in cases(quick):
        for launch in launches_of(case, capability, block_size):
            key = (launch.kernel.fn.__name__, case.shape.name)
            if key in seen:
                continue
            seen.add(key)
            rows += rows_of(f"{key[0]} {key[1]} sm_{capability}", capability, aot.resources(launch, capability))
    for what, launches in every_product(capability):
        for launch in launches:
            name = f"{launch.kernel.fn.__name__} {what} sm_{capability}"
            rows += rows_of(name, capability, aot.resources(launch, capability))
    return rows


def launches_of(case: Case, capability: int, block_size: int) -> list[aot.Launch]:
    """The backend's launches for `case`, recorded instead of executed."""
    batch, num_blocks = batch_of(case, block_size, "meta")
    q, kv = tensors_of(case, num_blocks, block_size, "meta")
    tiles = find_tiles(case.shape.head_size, q.itemsize, SHARED_BYTES[capability])
    backend = TritonBackend(tiles=tiles)
    return aot.record(lambda: backend.attend(q, kv, batch, backend.plan(batch), 1.0))


def tile_rows(capability: int) -> tuple[list[Row], list[str]]:
    """A row with the registers of every kernel, head size and type of queries and KV, with the other resources in
    notes; and what any of them lacks."""
    rows, lacking = [], []
    for head_size, dtype, kv_dtype, tiles in every_pair(capability):
        launches = attention_launches(head_size, dtype, tiles, BLOCKS, kv_dtype)
        launches |= attention_launches(head_size, dtype, tiles, LLAMA, kv_dtype)
        for name in KERNELS.keys() & launches:
            used = aot.resources(launches[name], capability)
            types = f"{str(dtype).removeprefix('torch.')} over {kv_dtype or 'the same'}"
            case = f"{name} D{head_size} {types} sm_{capability}"
            note = f"{case}: {used.spill_bytes} B spilled, {used.shared_bytes / 1024:.0f} KiB shared, {cores_of(used)}"
            rows.append(Row(case, "registers", "per thread", used.registers, limits={"most": REGISTERS}, note=note))
            if short := shortfall(name, tiles, dtype, kv_dtype, capability, used):
                lacking.append(f"{case}: {short}")
    return rows, lacking


def rows_of(case: str, capability: int, used: aot.Resources) -> list[Row]:
    """The resources of one kernel."""
    most, shared = SHARED_BYTES[capability] / 1024, used.shared_bytes / 1024
    return [
        Row(case, "registers", "per thread", used.registers, limits={"most": REGISTERS}),
        Row(case, "spills", "bytes", used.spill_bytes),
        Row(case, "shared memory", "KiB", shared, limits={"most": most}, note=f"{case}: {cores_of(used)}"),
    ]


def cores_of(used: aot.Resources) -> str:
    return f"wgmma {used.wgmma}, mma {used.mma}, 16-byte loads {used.wide_loads}"
