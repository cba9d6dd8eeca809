"""The kernels of the attention benchmark's cases, compiled without a GPU: what they take of a multiprocessor."""

from __future__ import annotations

from attention import aot
from attention.tiles import find_tiles
from attention.triton_backend import TritonBackend
from attention_bench.cases import Case, batch_of, cases, tensors_of
from benchlib.results import Row

SHARED_KIB = {80: 163, 86: 99, 90: 227}
REGISTERS = 255
"""Most registers that a thread can have; more spill."""


def compiled_rows(capability: int, block_size: int, quick: bool) -> list[Row]:
    """Registers, spills and shared memory of every kernel that the cases launch."""
    rows, seen = [], set()
    for case in cases(quick):
        for launch in launches_of(case, capability, block_size):
            key = (launch.kernel.fn.__name__, case.shape.name)
            if key in seen:
                continue
            seen.add(key)
            used = aot.resources(aot.build(launch, capability))
            name = f"{key[0]} {key[1]} sm_{capability}"
            cores = f"wgmma {used.wgmma}, mma {used.mma}, 16-byte loads {used.wide_loads}"
            rows += [
                Row(name, "registers", "per thread", used.registers, limits={"most": REGISTERS}),
                Row(name, "spills", "bytes", used.spill_bytes),
                Row(
                    name,
                    "shared memory",
                    "KiB",
                    used.shared_bytes / 1024,
                    limits={"most": SHARED_KIB[capability]},
                    note=f"{name}: {cores}",
                ),
            ]
    return rows


def launches_of(case: Case, capability: int, block_size: int) -> list[aot.Launch]:
    """What the backend launches for `case`, noted instead of made."""
    batch, num_blocks = batch_of(case, block_size, "meta")
    q, kv = tensors_of(case, num_blocks, block_size, "meta")
    tiles = find_tiles(case.shape.head_size, q.itemsize, SHARED_KIB[capability] * 1024)
    backend = TritonBackend(tiles=tiles)
    return aot.record(lambda: backend.attend(q, kv, batch, backend.plan(batch), 1.0))
