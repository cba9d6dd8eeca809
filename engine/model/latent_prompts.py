"""Prompts of latent attention with keys and values of heads: the unabsorbed form of engine/model/latent.py.

    k_h = [c W_UK,h | p]     v_h = c W_UV,h     of every token of the context, from its row in the pool

A head's query and key have `nope + rope` elements then, not `rank + rope`, so scores and sums cost less; but the keys
and values of the context are computed for every chunk. A chunk of T rows over a context of C tokens has T (2C - T) / 2
pairs of a row and a key. The absorbed form multiplies the T new rows by W_UK and W_UV, this form the whole context. So
this form is faster if

    T (2C - T) > r (C - T)     r: twice the cost of a key and a value, divided by what a pair costs less

A prompt without a past gains at any length; a long past needs a chunk of more than about r / 2 rows. `measured` finds r
on a CPU, once for a model. Keys and values exist for one request and some of its heads at a time, in a small pool of
their own, which any attention backend reads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.choice.quiet import undisturbed
from attention.codes import rows_of
from attention.interface import AttentionBackend, RaggedBatch
from attention.latent import attend_latent
from engine.model.latent_config import Latent
from engine.model.ops.interface import PerHead

log = logging.getLogger(__name__)

BLOCK_SIZE = 128
"""Tokens per block of the pool of keys and values: a whole tile of keys, which Hopper copies in one box."""

ROOM_BYTES = 64 << 20
"""Of this pool: as many heads at a time as fit, at least one."""

LEAST_ROWS = 64
"""Shorter chunks are absorbed: the products of a short context are many small calls."""

PROMPT, ROUNDS = 512, 5
"""The measured chunk, which has no past; the best of the rounds counts, because other processes only make one longer.
"""


@dataclass(slots=True)
class Chunk:
    """One request's rows of a step, whose keys and values are computed."""

    rows: slice
    blocks: Tensor  # [blocks of its context] int64
    tokens: int  # of its context
    batch: RaggedBatch  # in the pool of keys and values
    plan: Any


@dataclass(slots=True)
class Rest:
    """The rows of a step that are absorbed."""

    rows: slice | Tensor
    batch: RaggedBatch
    plan: Any


@dataclass(slots=True)
class Split:
    """A step in both forms."""

    step: RaggedBatch
    rest: Rest | None
    chunks: list[Chunk]


class LatentPrompts:
    """Which chunks of a step have keys and values of heads, and their attention; one for all layers of a model."""

    def __init__(self, sizes: Latent, num_heads: int, scale: float, backend: AttentionBackend) -> None:
        self.sizes, self.num_heads, self.scale, self.backend = sizes, num_heads, scale, backend
        self.head_size = -(-max(sizes.query_size, sizes.value_size) // 16) * 16  # what kernels take
        self.least_rows = LEAST_ROWS
        self.ratio = by_arithmetic(sizes, self.head_size)
        """The r of above; inf: all chunks are absorbed."""
        if sizes.prompts == "absorbed":
            self.ratio = math.inf
        elif sizes.prompts == "heads":
            self.least_rows, self.ratio = 2, 0.0
        self._split: Split | None = None

    def takes(self, rows: int, context: int) -> bool:
        """Whether a chunk of `rows`, which are the last of its context, has keys and values of heads."""
        if rows < self.least_rows or self.ratio == math.inf:
            return False
        return rows * (2 * context - rows) > self.ratio * (context - rows)

    def split(self, batch: RaggedBatch) -> Split | None:
        """The parts of a step; None: all of it is absorbed. Made at the first layer."""
        if batch.recorded:
            return None
        if self._split is None or self._split.step is not batch:
            taken = [s for s, sizes in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)) if self.takes(*sizes)]
            self._split = self._made(batch, taken)
        return self._split if self._split.chunks else None

    def _made(self, batch: RaggedBatch, taken: list[int]) -> Split:
        chunks, starts = [], [0]
        for count in batch.q_lens:
            starts.append(starts[-1] + count)
        for s in taken:
            inner = one_request(batch.q_lens[s], batch.kv_lens[s], batch.positions.device)
            blocks = batch.block_tables[s, : -(-batch.kv_lens[s] // batch.block_size)].long()
            rows = slice(starts[s], starts[s + 1])
            chunks.append(Chunk(rows, blocks, batch.kv_lens[s], inner, self.backend.plan(inner)))
        left = [s for s in range(batch.num_requests) if s not in taken] if taken else []
        return Split(batch, self._rest(batch, left, starts) if left else None, chunks)

    def _rest(self, batch: RaggedBatch, requests: list[int], starts: list[int]) -> Rest:
        """These requests alone, in the same order."""
        device = batch.positions.device
        rows: slice | Tensor = slice(0, batch.num_decodes)
        if len(requests) > batch.num_decodes:
            rows = torch.cat([torch.arange(starts[s], starts[s + 1], device=device) for s in requests])
        lens, at = [batch.q_lens[s] for s in requests], torch.tensor(requests, device=device)
        inner = RaggedBatch(
            cu_q=torch.tensor([0, *lens], device=device).cumsum(0).int(),
            ctx_lens=batch.ctx_lens[at],
            block_tables=batch.block_tables[at],
            slot_mapping=batch.slot_mapping[rows],
            positions=batch.positions[rows],
            num_decodes=batch.num_decodes,
            block_size=batch.block_size,
            q_lens=lens,
            kv_lens=[batch.kv_lens[s] for s in requests],
        )
        return Rest(rows, inner, self.backend.plan(inner))

    def attend(
        self, chunk: Chunk, nope: Tensor, rope: Tensor, kv: Tensor, to_latent: PerHead, to_value: PerHead
    ) -> Tensor:
        """[rows, num_heads, value_size] of a chunk whose rows are in kv [num_blocks, 1, 1, block_size, row], from its
        queries: nope [rows, num_heads, nope_size] and rope [rows, num_heads, rope_size], rotated."""
        sizes, size, dtype = self.sizes, self.head_size, nope.dtype
        context = rows_of(kv, lambda pool: pool[:, 0, 0].index_select(0, chunk.blocks), dtype).flatten(0, 1)
        latent, key = context[: chunk.tokens].split((sizes.rank, sizes.rope_size), 1)
        q = torch.cat((nope, rope, nope.new_zeros(*nope.shape[:2], size - sizes.query_size)), 2)
        out = nope.new_empty(len(nope), self.num_heads, sizes.value_size)
        num_blocks = -(-chunk.tokens // BLOCK_SIZE)
        block = 2 * BLOCK_SIZE * size * dtype.itemsize
        at_once = min(self.num_heads, max(1, ROOM_BYTES // (num_blocks * block)))
        pool = nope.new_zeros(num_blocks, 2, at_once, BLOCK_SIZE, size)
        fill(pool[:, 0, :, :, sizes.nope_size : sizes.query_size], key[:, None].expand(-1, at_once, -1))
        last = self.num_heads - at_once  # it may overlap the group before: the pool of every group has all its heads
        for first in [*range(0, last, at_once), last]:
            heads = range(first, first + at_once)
            for place, head in enumerate(heads):
                fill(pool[:, 0, place, :, : sizes.nope_size], to_latent.back(latent, head))
                fill(pool[:, 1, place, :, : sizes.value_size], to_value.one(latent, head))
            mine = slice(heads.start, heads.stop)
            attended = self.backend.attend(q[:, mine], pool, chunk.batch, chunk.plan, self.scale)
            out[:, mine] = attended[..., : sizes.value_size]
        return out


def fill(pool: Tensor, rows: Tensor) -> None:
    """pool [num_blocks, (heads,) BLOCK_SIZE, n] gets rows [tokens, (heads,) n]; what lies behind them stays."""
    whole = len(rows) // BLOCK_SIZE
    if pool.dim() == 4:
        pool = pool.transpose(1, 2)
    pool[:whole].copy_(rows[: whole * BLOCK_SIZE].unflatten(0, (whole, BLOCK_SIZE)))
    if len(rows) > whole * BLOCK_SIZE:
        pool[whole, : len(rows) - whole * BLOCK_SIZE] = rows[whole * BLOCK_SIZE :]


def one_request(rows: int, context: int, device: torch.device | str) -> RaggedBatch:
    """The last `rows` of a context that lies in blocks 0, 1, ... of BLOCK_SIZE tokens."""
    positions = torch.arange(context - rows, context, device=device)
    return RaggedBatch(
        cu_q=torch.tensor([0, rows], dtype=torch.int32, device=device),
        ctx_lens=torch.tensor([context], dtype=torch.int32, device=device),
        block_tables=torch.arange(-(-context // BLOCK_SIZE), dtype=torch.int32, device=device)[None],
        slot_mapping=positions,
        positions=positions,
        num_decodes=int(rows == 1),
        block_size=BLOCK_SIZE,
        q_lens=[rows],
        kv_lens=[context],
    )


def measured(prompts: LatentPrompts, to_latent: PerHead, to_value: PerHead, dtype: torch.dtype) -> float:
    """r on this CPU with one layer's matrices, as a power of two, so that equal nodes mostly find the same."""
    sizes, heads = prompts.sizes, prompts.num_heads
    batch = one_request(PROMPT, PROMPT, "cpu")
    plan = prompts.backend.plan(batch)
    kv = torch.ones(-(-PROMPT // BLOCK_SIZE), 1, 1, BLOCK_SIZE, sizes.row_size, dtype=dtype)
    nope, rope = (torch.ones(PROMPT, heads, size, dtype=dtype) for size in (sizes.nope_size, sizes.rope_size))
    chunk = Chunk(slice(0, PROMPT), batch.block_tables[0].long(), PROMPT, batch, plan)
    q = torch.ones(PROMPT, heads, prompts.head_size, dtype=dtype)
    pool = torch.ones(len(kv), 2, heads, BLOCK_SIZE, prompts.head_size, dtype=dtype)

    def absorbed() -> None:
        query = torch.cat((to_latent(nope), rope), 2)
        to_value(attend_latent(prompts.backend, query, kv, batch, plan, prompts.scale, sizes.rank))

    def with_heads() -> None:
        prompts.attend(chunk, nope, rope, kv, to_latent, to_value)

    def attention() -> None:
        prompts.backend.attend(q, pool, batch, plan, prompts.scale)

    (whole, split, inner), threads = undisturbed(lambda check: shortest([absorbed, with_heads, attention], check))
    less, more = whole - split, max(split - inner, 0.0)
    ratio = math.inf if less <= 0 else 2.0 ** round(math.log2(max(PROMPT * more / less, 1.0)))
    log.info(
        "prompts over a latent: %.2f ms absorbed, %.2f ms with keys and values of heads, of which %.2f ms attention, "
        "for %d new tokens of one layer, %d threads; %s",
        1e3 * whole,
        1e3 * split,
        1e3 * inner,
        PROMPT,
        threads,
        "always absorbed" if less <= 0 else f"behind a long past, absorbed up to about {ratio / 2:.0f} new tokens",
    )
    return ratio


def shortest(calls: Sequence[Callable[[], None]], check: Callable[[], None]) -> list[float]:
    """Seconds of each, the best of ROUNDS in turns, after one uncounted round. Calls `check` after each round."""
    best = [math.inf] * len(calls)
    for turn in range(ROUNDS + 1):
        for i, call in enumerate(calls):
            began = time.perf_counter()
            call()
            if turn:
                best[i] = min(best[i], time.perf_counter() - began)
        check()
    return best


def by_arithmetic(sizes: Latent, head_size: int) -> float:
    """r by the number of multiplications; inf: keys and values of heads never pay."""
    less = 2 * sizes.rank + sizes.rope_size - 2 * head_size
    return 2 * sizes.rank * (sizes.nope_size + sizes.value_size) / less if less > 0 else math.inf
