"""Timing of attention on the CPU: the cpu backend at each level of this CPU against the torch backend, in the same run.

One call is one layer's attention. Calls of decodes walk over the layers of page-major pools that together exceed the
last cache several times, so none finds its KV in a cache. Ours are called through prepared arguments, as by the engine.
All levels and torch take turns. The best of several rounds counts for each call, and these times are added. So other
work on the machine disturbs all of them equally and little.

Limits, for the same number of threads (lab/bench/ops/limits.py); a share above 1 marks the limit as invalid:
    read   GB/s of summing huge pages in order: the limit of decode, whose goal is 0.7 of it
    blocks GB/s of only reading the same blocks in the same order (lab/bench/ops/blocks.py), in turns with the kernels
    GEMM   GFLOP/s of the fastest product by a torch with the level's instructions, in bfloat16 for levels that multiply
           it, else in float32: the limit of prefill if the softmax were free; the goal is 0.6 of it

Each share is a row of its own, whose limit is the goal. On AMX a prefill cannot come near the GEMM rate: a score costs
an exponential in addition to two products of 64 multiply-adds, and vector arithmetic is slower next to tile
instructions.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attention.codes import DTYPES as CODES
from attention.codes import planes, pool_in
from attention.cpu.backend import CpuBackend, Plan, attend_call
from attention.cpu.level import levels_here
from attention.interface import AttentionBackend, RaggedBatch
from attention.torch_backend import TorchBackend
from cache.block import BlockGeometry
from engine.model.ops.huge_pages import HugePages
from lab.bench.attention.cases import LLAMA_8B, SMOLLM2, Case, batch_of
from lab.bench.common.results import Row, exceeded
from lab.bench.common.timing import best_in_turns
from lab.bench.ops.blocks import WAYS, BlockReader, span_bytes
from lab.bench.ops.limits import gemm_rates, multiplied, read_rate

LAYERS = 30
POOL_BYTES = 256 << 20
"""Larger pools get fewer layers, and in smaller ones there are several sets of requests."""
SECONDS = 0.4
"""Measuring time for each number; at least one round."""
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
"""Type of the pool -> of the queries."""
GOALS = {"read": 0.7, "GEMM": 0.6}
NOISE = 1.1


def cpu_cases(quick: bool) -> list[Case]:
    decodes = [(1, 1024), (8, 256)] if quick else [(1, 1024), (8, 256), (8, 1024), (32, 1024)]
    chunks = [(128, 128), (512, 512)] if quick else [(128, 128), (512, 512), (2048, 2048), (8000, 8000), (1024, 8024)]
    listed = [Case(SMOLLM2, requests, context, 1) for requests, context in decodes]
    listed += [Case(SMOLLM2, 1, context, chunk) for chunk, context in chunks]
    return listed if quick else [*listed, *(replace(listed[i], shape=LLAMA_8B) for i in (2, 6))]


def cpu_rows(block_size: int, threads: list[int], quick: bool, levels: list[str]) -> list[Row]:
    before, rows = torch.get_num_threads(), []
    gemm = {level: gemm_rates(level, threads) for level in levels}
    try:
        for count in threads:
            torch.set_num_threads(count)
            read = read_rate(count)
            for kind, case in itertools.product(KINDS, cpu_cases(quick)):
                limit = {level: gemm[level][count][multiplied(level, KINDS[kind])] for level in levels}
                rows += case_rows(case, block_size, count, kind, limit, read)
    finally:
        torch.set_num_threads(before)
    return rows


def case_rows(case: Case, block_size: int, threads: int, kind: str, gemm: dict[str, float], read: float) -> list[Row]:
    """Each level's time with torch's, and its rate with the limit. gemm: of each level."""
    batch, num_blocks = batch_of(case, block_size, "cpu")
    shape = case.shape
    per_layer = num_blocks * BlockGeometry(1, shape.num_kv_heads, shape.head_size, block_size, kind).block_bytes
    layers = max(1, min(LAYERS, POOL_BYTES // per_layer)) if case.chunk == 1 else 1
    sets = -(-POOL_BYTES // (layers * per_layer)) if case.chunk == 1 else 1
    q = torch.randn(case.requests * case.chunk, shape.num_heads, shape.head_size).to(KINDS[kind])
    pool = random_pool(BlockGeometry(layers, shape.num_kv_heads, shape.head_size, block_size, kind), sets * num_blocks)
    batches = [replace(batch, block_tables=batch.block_tables + i * num_blocks) for i in range(sets)]
    backends: list[AttentionBackend] = [*map(CpuBackend, gemm), TorchBackend()]
    calls = [calls_of(backend, q, pool, batches, shape.head_size**-0.5) for backend in backends]
    if case.chunk == 1:
        calls += [block_reads(way, pool, batches, threads) for way in WAYS]
    took_each = [sum(best) / len(best) for best in best_seconds(*calls)]
    ours, theirs, reads = took_each[: len(gemm)], took_each[len(gemm)], took_each[len(gemm) + 1 :]
    rows = []
    for level, took in zip(gemm, ours, strict=True):
        name = f"{level}, {kind}, {case.name}, {threads} threads"
        rows.append(Row(name, "time", "us", took * 1e6, {"torch": theirs * 1e6}))
        if case.chunk > 1:
            rows.append(Row(name, "rate", "GFLOP/s", case.operations / took / 1e9, limits={"GEMM": gemm[level]}))
        else:
            rate = (batch_bytes(case, block_size, per_layer, num_blocks) + 2 * q.nbytes) / took / 1e9
            blocks = num_blocks * span_bytes(pool[:, 0]) / min(reads) / 1e9
            rows.append(Row(name, "rate", "GB/s", rate, limits={"read": read, "blocks": blocks}))
    return rows


def share_rows(rows: Sequence[Row]) -> list[Row]:
    """A row for each limit of each rate: the share of it, and the goal if it has one."""
    return [
        Row(
            row.case,
            f"share of {name}",
            "",
            (row.ours or 0.0) / value,
            limits={"goal": GOALS[name]} if name in GOALS else {},
        )
        for row in rows
        for name, value in row.limits.items()
        if row.metric == "rate"
    ]


def block_reads(way: str, pool: Tensor, batches: Sequence[RaggedBatch], threads: int) -> list[Callable[[], object]]:
    """One call for each of `batches` and layers, as `calls_of`: it only reads the blocks."""
    reader = BlockReader(levels_here()[0])
    return [
        reader.call(way, pool[:, layer], batch.block_tables, threads)
        for batch, layer in itertools.product(batches, range(pool.shape[1]))
    ]


def batch_bytes(case: Case, block_size: int, per_layer: int, num_blocks: int) -> float:
    """Bytes of K and V, with the scales, of the tokens of a case in one layer."""
    return per_layer / (num_blocks * block_size) * case.requests * case.context


def random_pool(geometry: BlockGeometry, num_blocks: int) -> Tensor:
    """[num_blocks, *geometry.shape] in huge pages, as the arena of a node. All blocks have the same content."""
    memory = HugePages().take(num_blocks * geometry.block_bytes, dtype=torch.uint8)
    pool = pool_in(memory, geometry.shape, geometry.dtype)
    block = torch.randn(geometry.shape)
    for plane, rows in planes(pool, block if geometry.dtype in CODES else block.to(pool.dtype)):
        plane.copy_(rows.expand(plane.shape))
    return pool


def calls_of(
    backend: AttentionBackend, q: Tensor, pool: Tensor, batches: Sequence[RaggedBatch], scale: float
) -> list[Callable[[], object]]:
    """One call for each of `batches` and layers."""
    calls: list[Callable[[], object]] = []
    for batch, layer in itertools.product(batches, range(pool.shape[1])):
        plan = backend.plan(batch)
        if isinstance(backend, CpuBackend):
            calls.append(PreparedCall(backend, q, pool[:, layer], batch, plan, scale))
        else:
            calls.append(partial(backend.attend, q, pool[:, layer], batch, plan, scale))
    return calls


class PreparedCall:
    """A call of a C function whose arguments are in place, as attention/cpu/layers.py makes them for the engine."""

    def __init__(
        self, backend: CpuBackend, q: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan, scale: float
    ) -> None:
        self.keeps = q, kv, plan, torch.empty_like(q)
        self.arguments = attend_call(q, kv, plan, scale, 0, 0.0)
        self.arguments.q, self.arguments.out = q.data_ptr(), self.keeps[-1].data_ptr()
        self.arguments.first, self.arguments.last = 0, batch.num_requests
        kernels = backend.library
        self.function = kernels.mooncake_decode if batch.num_decodes else kernels.mooncake_prefill
        self.address = ctypes.addressof(self.arguments)

    def __call__(self) -> None:
        self.function(self.address)


def slower_than_torch(rows: list[Row]) -> list[str]:
    """The cases in which ours took longer, by more than the noise."""
    return [row.case for row in rows if row.ours and (row.peers.get("torch") or row.ours) * NOISE < row.ours]


def shares(rows: list[Row]) -> list[str]:
    """A line for each limit, level, type and number of threads: the smallest and the largest share, and the goal. A
    limit that a row exceeds is named as invalid."""
    found: dict[tuple[str, str], list[float]] = {}
    invalid: set[tuple[str, str]] = set()
    for row in rows:
        if row.metric != "rate":
            continue
        level, kind, _, threads = row.case.split(", ")
        for limit, value in row.limits.items():
            key = limit, f"{level}, {kind}, {threads}"
            found.setdefault(key, []).append((row.ours or 0.0) / value)
            if limit in exceeded(row):
                invalid.add(key)
    return [
        f"share of {limit}{f' (goal {GOALS[limit]})' if limit in GOALS else ''}: {where}: "
        f"{min(each):.2f} to {max(each):.2f}" + (", invalid limit" if (limit, where) in invalid else "")
        for (limit, where), each in sorted(found.items())
    ]


def best_seconds(*contenders: Sequence[Callable[[], object]]) -> list[list[float]]:
    """The best seconds of each call of each contender, in turns."""
    return best_in_turns(SECONDS, *contenders)
