"""Attention kernels compiled without a GPU: the resources of a multiprocessor that they need.
The kernels are those of the benchmark's cases and of products with quantized weights, or of all tiles."""

from __future__ import annotations

import math

from attention.triton import aot
from attention.triton.backend import Limits, TritonBackend
from attention.triton.prefill import tile_shape
from attention.triton.tiles import find_tiles
from lab.bench.attention.cases import Case, batch_of, cases, tensors_of
from lab.bench.attention.cost import GPUS, Turn, turn_of
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
    """Registers, spills and shared memory of every kernel that the cases and products with quantized weights launch;
    of those of attention also the cycles of a turn (lab/bench/attention/cost.py), and the programs of every case."""
    rows, seen = [], set()
    for case in cases(quick):
        for launch in launches_of(case, capability, block_size):
            key = (launch.kernel.fn.__name__, case.shape.name)
            if key[0] in KERNELS:
                rows.append(programs_row(f"{key[0]} {case.name} sm_{capability}", capability, launch, case))
            if key in seen:
                continue
            seen.add(key)
            name = f"{key[0]} {key[1]} sm_{capability}"
            rows += rows_of(name, capability, aot.resources(launch, capability))
            if key[0] in KERNELS and (turn := turn_of(launch, capability)) is not None:
                rows += turn_rows(name, turn)
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
    limits = Limits(SHARED_BYTES[capability], GPUS[capability].multiprocessors, capability == 90)
    backend = TritonBackend(tiles=tiles, limits=limits)
    return aot.record(lambda: backend.attend(q, kv, batch, backend.plan(batch), 1.0))


def tile_rows(capability: int) -> tuple[list[Row], list[str]]:
    """A row with the registers of every kernel, head size and type of queries and KV, with the other resources in
    notes; and what any of them lacks."""
    rows, lacking = [], []
    for head_size, dtype, kv_dtype, tiles in every_pair(capability):
        launches = attention_launches(head_size, dtype, tiles, BLOCKS, kv_dtype)
        launches |= attention_launches(head_size, dtype, tiles, LLAMA, kv_dtype)
        for name in (name for name in KERNELS if name in launches):
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


def programs_row(name: str, capability: int, launch: aot.Launch, case: Case) -> Row:
    """The grid of a launch, an upper bound on the programs that have work; for short queries also the programs that the
    kernel of long ones would run."""
    limits = {"multiprocessors": float(GPUS[capability].multiprocessors)}
    if launch.kernel.fn.__name__ == "short_kernel":
        shape = case.shape
        tiles = find_tiles(shape.head_size, 2, SHARED_BYTES[capability])
        queries, heads = tile_shape(shape.num_heads // shape.num_kv_heads, tiles.prefill.rows)
        of_group = shape.num_kv_heads * -(-shape.num_heads // shape.num_kv_heads // heads)
        limits["without splits"] = float(case.requests * -(-case.chunk // queries) * of_group)
    return Row(name, "programs", "", math.prod(launch.grid), limits=limits)


def turn_rows(case: str, turn: Turn) -> list[Row]:
    """The model's cycles of a turn with what bounds them, and the share of the rate of products that is left."""
    loop = turn.loop
    bounds = {"products": turn.products, "issue": turn.issue, "special": turn.special, "copies": turn.copies}
    note = (
        f"{case}: a turn of {loop.instructions} instructions per warp has {loop.products} products, {loop.waits} waits "
        f"for them and {loop.barriers} barriers; {turn.resident} programs on a multiprocessor, {turn.groups} groups of "
        "warps that need not wait for one another"
    )
    return [
        Row(case, "a turn, by the model", "cycles", turn.cycles, limits=bounds, note=note),
        Row(case, "products, by the model", "share of the peak", turn.products / turn.cycles),
    ]


def cores_of(used: aot.Resources) -> str:
    cores = f"wgmma {used.wgmma}, mma {used.mma}, 16-byte loads {used.wide_loads}, boxes {used.boxes}"
    return f"{cores}, {used.threads} threads" + (", products in a row" if used.serialized else "")
