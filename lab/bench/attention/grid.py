"""The reference grid: random steps on which every attention backend must be correct, on any device.

The rule for each step; truth is the reference backend in float64, plain is the same in the dtype under test:

    max |ours - truth| <= 2 max |plain - truth| + SLACK

All slots of the pool that hold no token of the step are NaN, including block 0 (which pads the tables, and replaces the
blocks that a window hides from all rows) and the neighbouring layer: a read of one shows in the output. A step is also
wrong if its keys are written outside their slots, or if `attend` changes the pool.

tests/attention holds the built-in backends to this grid, scripts/playground.py yours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attention.interface import AttentionBackend, RaggedBatch
from attention.reference import ReferenceBackend

Mix = list[tuple[int, int]]
"""(tokens of this step, tokens before them) of each request, decodes first."""

MIXES: dict[str, Mix] = {
    "one fresh token": [(1, 0)],
    "one decode": [(1, 40)],
    "decodes of one length": [(1, 63), (1, 63), (1, 63)],
    "ragged decodes": [(1, 0), (1, 15), (1, 16), (1, 17), (1, 200), (1, 190), (1, 3)],
    "whole prompts": [(37, 0), (2, 0), (64, 0)],
    "prefix and chunk": [(33, 1), (16, 64), (5, 130)],
    "everything": [(1, 31), (1, 90), (1, 0), (48, 0), (7, 70), (2, 15)],
}
LONG: dict[str, Mix] = {
    "long decodes": [(1, 1299), (1, 530), (1, 40)],
    "a chunk after a long prefix": [(70, 1100)],
    "long and short": [(1, 700), (33, 590), (5, 0)],
}
"""Contexts longer than every tile, split and smallest piece of work of the built-in kernels."""

SHARP = 12.0
"""Factor on scores with which the running maximum of a row rises several times, and a few keys have all the weight."""

LONG_MASKS = ((0, 1.0), (300, 1.0), (0, SHARP))
"""(window, sharpness) of long contexts."""

GEOMETRIES = [(heads, kv_heads, size) for heads, kv_heads in ((3, 3), (9, 3), (8, 1)) for size in (32, 64, 80, 128)]
"""(query heads, KV heads, head size): groups of 1, 3 and 8."""
BLOCK_SIZES = (16, 32, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = ((40, 0.0), (0, 5.0), (40, 5.0))
"""(window, soft cap), in addition to (0, 0.0)."""

SLACK = 1e-6
"""Outputs are of the order of 1: in float32 the fused kernel's exp is accurate to a few units in the last place."""


@dataclass(frozen=True, slots=True)
class Point:
    """One step of the grid."""

    mix: str
    heads: int
    kv_heads: int
    size: int
    block_size: int
    dtype: torch.dtype
    window: int = 0
    soft_cap: float = 0.0
    sharpness: float = 1.0  # factor on the scores
    sinks: bool = False

    def __str__(self) -> str:
        mask = f", window {self.window}" if self.window else ""
        mask += f", soft cap {self.soft_cap:g}" if self.soft_cap else ""
        mask += f", scores x{self.sharpness:g}" if self.sharpness != 1 else ""
        mask += ", sinks" if self.sinks else ""
        kind = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads}/{self.kv_heads} heads of {self.size}"
        return f"{self.mix}, {heads}, blocks of {self.block_size}, {kind}{mask}"


def points(quick: bool = False) -> Iterator[Point]:
    """Every combination without window and soft cap, then windows and soft caps on two geometries, then long contexts
    on the same two. `quick`: a tenth of the points."""
    geometries, blocks = (GEOMETRIES[5:6], BLOCK_SIZES[:1]) if quick else (GEOMETRIES, BLOCK_SIZES)
    for dtype, block_size, (heads, kv_heads, size), mix in product(DTYPES, blocks, geometries, MIXES):
        yield Point(mix, heads, kv_heads, size, block_size, dtype)
    for dtype, (heads, kv_heads, size), (window, soft_cap) in product(DTYPES, GEOMETRIES[5:8:2], MASKS):
        yield Point("everything", heads, kv_heads, size, 16, dtype, window, soft_cap)
    long = GEOMETRIES[5:6] if quick else GEOMETRIES[5:8:2]
    for dtype, (heads, kv_heads, size), mix, (window, sharpness) in product(DTYPES, long, LONG, LONG_MASKS):
        yield Point(mix, heads, kv_heads, size, 16, dtype, window, sharpness=sharpness)


def sink_points() -> Iterator[Point]:
    """Heads with sinks, for backends that take them: decodes in one split and in several, chunks with and without a
    prefix, windows and soft caps."""
    mixes = ("ragged decodes", "everything", "long and short")
    for dtype, mix, (window, soft_cap) in product(DTYPES, mixes, ((0, 0.0), (40, 5.0))):
        yield Point(mix, 9, 3, 64, 16, dtype, window, soft_cap, sinks=True)


class Case:
    """A random step: its batch, the pool with all earlier tokens in place and NaN elsewhere, and the step's q, k, v.

    pool [blocks, 2 layers, 2, kv_heads, block_size, size]; kv is its layer 1, a strided view, as the model passes it.
    """

    def __init__(
        self, mix: Mix, heads: int, kv_heads: int, size: int, block_size: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(len(mix) * 1000 + heads * 100 + size + block_size)
        batch = ragged_batch(mix, block_size, generator)
        blocks = int(batch.block_tables.max()) + 3
        self.scale = size**-0.5
        pool = torch.full((blocks, 2, 2, kv_heads, block_size, size), torch.nan, dtype=dtype)
        rows = sum(q_len for q_len, _ in mix)
        self.q, self.k, self.v = (
            torch.randn(rows, n, size, generator=generator).to(device, dtype) for n in (heads, kv_heads, kv_heads)
        )
        for s, (_, past) in enumerate(mix):
            position = torch.arange(past)
            tokens = torch.randn(past, 2, kv_heads, size, generator=generator).to(dtype)
            pool[batch.block_tables[s, position // block_size], 1, :, :, position % block_size] = tokens
        self.batch = moved(batch, device)
        self.pool = pool.to(device)
        self.kv = self.pool[:, 1]

    @classmethod
    def at(cls, point: Point, device: str = "cpu") -> Case:
        geometry = (point.heads, point.kv_heads, point.size)
        case = cls((MIXES | LONG)[point.mix], *geometry, point.block_size, point.dtype, device)
        case.scale *= point.sharpness
        return case

    def run(
        self,
        backend: AttentionBackend,
        dtype: torch.dtype,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write and attend, with the inputs and a copy of the pool in `dtype`."""
        options: dict[str, Any] = {} if sinks is None else {"sinks": sinks.to(dtype)}
        kv = self.kv.to(dtype, copy=True)
        plan = backend.plan(self.batch)
        backend.write_kv(self.k.to(dtype), self.v.to(dtype), kv, self.batch, plan)
        q = self.q.to(dtype)
        return backend.attend(q, kv, self.batch, plan, self.scale, window=window, soft_cap=soft_cap, **options)

    def sinks(self) -> Tensor:
        """[num_heads]: some with most of the weight, some with little."""
        generator = torch.Generator().manual_seed(self.q.shape[1])
        return (3 * torch.randn(self.q.shape[1], generator=generator)).to(self.q.device, self.q.dtype)


def ragged_batch(mix: Mix, block_size: int, generator: torch.Generator) -> RaggedBatch:
    """Blocks in random order, none of them block 0; two padding columns in the tables."""
    q_lens, kv_lens = [q for q, _ in mix], [q + past for q, past in mix]
    counts = [-(-n // block_size) for n in kv_lens]
    shuffled = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    tables = torch.zeros(len(mix), max(counts) + 2, dtype=torch.int32)
    slots, positions = [], []
    for s, (q_len, past) in enumerate(mix):
        own = [shuffled.pop() for _ in range(counts[s])]
        tables[s, : len(own)] = torch.tensor(own)
        for position in range(past, past + q_len):
            slots.append(own[position // block_size] * block_size + position % block_size)
            positions.append(position)
    return RaggedBatch(
        cu_q=torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32),
        ctx_lens=torch.tensor(kv_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        positions=torch.tensor(positions),
        num_decodes=q_lens.count(1),
        block_size=block_size,
        q_lens=q_lens,
        kv_lens=kv_lens,
    )


def moved(batch: RaggedBatch, device: str) -> RaggedBatch:
    names = ("cu_q", "ctx_lens", "block_tables", "slot_mapping", "positions")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def without_unseen(batch: RaggedBatch, window: int) -> RaggedBatch:
    """`batch` as a layer with a window may get it: blocks that no row of a request sees were given back, and block 0
    stands in their place (engine/step/inputs.py)."""
    tables = batch.block_tables.clone()
    for s, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        tables[s, : max(0, kv_len - q_len + 1 - window) // batch.block_size if window else 0] = 0
    return replace(batch, block_tables=tables)


def find_fault(backend: AttentionBackend, point: Point, device: str = "cpu") -> str | None:
    """The fault at this point, in one line; None = correct. NotImplementedError passes through: a backend may refuse a
    window or a soft cap, but not compute it wrongly."""
    case, reference = Case.at(point, device), ReferenceBackend()
    mask: dict[str, Any] = {"window": point.window, "soft_cap": point.soft_cap}
    if point.sinks:
        mask["sinks"] = case.sinks()
    if fault := _write_fault(backend, case):
        return fault
    truth = case.run(reference, torch.float64, **mask)
    plain = float((case.run(reference, point.dtype, **mask).double() - truth).abs().max())
    batch = without_unseen(case.batch, point.window)
    plan, before = backend.plan(batch), case.q.clone()
    backend.write_kv(case.k, case.v, case.kv, batch, plan)
    pool = case.pool.clone()
    ours = backend.attend(case.q, case.kv, batch, plan, case.scale, **mask)
    if ours.shape != case.q.shape or ours.dtype != case.q.dtype:
        return f"attend returns {list(ours.shape)} {ours.dtype}, wanted {list(case.q.shape)} {case.q.dtype}"
    if fault := far_off(ours, truth, plain):
        return fault
    if not torch.equal(case.q, before) or not _same(case.pool, pool):
        return "attend changes q or the pool"
    return None


def far_off(ours: Tensor, truth: Tensor, plain: float) -> str | None:
    """The fault of an output whose float64 value is `truth`; plain torch of its dtype is off by `plain`."""
    if not ours.isfinite().all():
        return "attend returns NaN or infinity: it reads a slot that holds no token of the request"
    error = float((ours.double() - truth).abs().max())
    if error > 2 * plain + SLACK:
        row = int((ours.double() - truth).abs().flatten(1).max(1).values.argmax())
        return f"attend is off by {error:.2e} (row {row}); plain torch by {plain:.2e}, allowed is twice that"
    return None


def _write_fault(backend: AttentionBackend, case: Case) -> str | None:
    """Checks both ways of writing against the reference; the last two rows are padding."""
    batch = replace(case.batch, slot_mapping=case.batch.slot_mapping.clone())
    if len(case.k) > 2:
        batch.slot_mapping[-2:] = -1
    expected, written = case.pool.clone(), case.pool.clone()
    ReferenceBackend().write_kv(case.k, case.v, expected[:, 1], batch, None)
    backend.write_kv(case.k, case.v, written[:, 1], batch, backend.plan(batch))
    if not _same(written, expected):
        return "write_kv leaves other bytes than k and v in their slots (slot -1 = skip), or touches other slots"
    heads, half = case.q.shape[1], case.q.shape[2] // 2
    qkv = torch.cat((case.q, case.k, case.v), 1)
    angle = batch.positions[:, None] * 0.1 ** torch.arange(half, device=qkv.device)
    cos, sin = angle.cos().float(), angle.sin().float()
    pools, queries = [], []
    for one, dtype in ((ReferenceBackend(), torch.float64), (ReferenceBackend(), qkv.dtype), (backend, qkv.dtype)):
        kv = case.pool.to(dtype, copy=True)
        turned = one.rotate_and_write_kv(qkv.to(dtype, copy=True), heads, cos, sin, kv[:, 1], batch, one.plan(batch))
        keep = batch.slot_mapping >= 0
        pools.append(kv.double().nan_to_num(0.0))
        queries.append(turned[keep].double())
    for what, (truth, plain, ours) in (("keys", pools), ("queries", queries)):
        if not float((ours - truth).abs().max()) <= 2 * float((plain - truth).abs().max()) + SLACK:
            return f"rotate_and_write_kv gives other {what} than attention/rotary.py"
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are equal, with NaN in the same places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
