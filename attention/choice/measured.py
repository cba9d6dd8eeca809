"""Chooses the attention backend for this CPU by a measurement with the model's heads.

Candidates are torch, the kernels of this CPU's best level, and those of lower levels that compute otherwise and are
compiled already (attention/cpu/level.py): a first start does not compile five levels. A forced level (--cpu-level) and
`scripts/bench.py attention` compile theirs, and later starts measure them too.

The candidates take turns, over KV of the arena's type: over codes, a backend may be slower than one that it beats over
floats. Each computes a prompt of PROMPT tokens, and DECODES decodes over CONTEXT tokens each. The best of ROUNDS
counts, because other processes only make a round longer. The product of the two times decides; the first candidate wins
unless another one is faster by more than NOISE, so that starts of one node agree. The measurement takes some tenths of
a second. The result is not stored, because it may come from a busy moment.
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
from attention.codes import DTYPES, SCALE_BYTES, planes, pool_in
from attention.cpu.level import levels_here
from attention.interface import AttentionBackend, RaggedBatch
from attention.latent import attend_latent

log = logging.getLogger(__name__)

PROMPT, DECODES, CONTEXT = 256, 4, 512
BLOCK_SIZE = 16
ROUNDS = 5
NOISE = 1.15
"""Ratio of the products of two times."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention parameters of one layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    rank: int = 0  # elements of the value of a latent row (attention/latent.py), which head_size contains; 0: no latent
    sinks: bool = False  # each head has one, which every candidate takes
    kv_dtype: str = ""  # of the pool, as in choose; empty: that of the model

    @property
    def pool(self) -> str:
        """The name of the pool's type."""
        return self.kv_dtype or str(self.dtype).removeprefix("torch.")


def fastest_of(candidates: Sequence[tuple[str, AttentionBackend]], heads: Heads) -> AttentionBackend:
    """The backend with the smallest product of times, from pairs (name in the log, backend); the first one if its
    product is at most NOISE times that."""
    batches = [batch_of([PROMPT], PROMPT), batch_of([1] * DECODES, CONTEXT)]
    backends = [backend for _, backend in candidates]
    (prompts, decodes), threads = undisturbed(
        lambda check: [seconds_of(backends, batch, heads, check) for batch in batches]
    )
    products = [prompt * decode for prompt, decode in zip(prompts, decodes, strict=True)]
    order = sorted(range(len(candidates)), key=products.__getitem__)
    if products[0] <= NOISE * products[order[0]]:
        order.remove(0)
        order.insert(0, 0)
    log.info(
        "attention by %s, measured with %d/%d heads of %d in %s over KV in %s, %d threads (CPU levels: %s): %s",
        candidates[order[0]][0],
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_size,
        str(heads.dtype).removeprefix("torch."),
        heads.pool,
        threads,
        ", ".join(levels_here()) or "none",
        "; ".join(
            f"{candidates[i][0]} {1e3 * prompts[i]:.2f} ms for {PROMPT} new tokens, "
            f"{1e3 * decodes[i]:.2f} ms for {DECODES} decodes over {CONTEXT}"
            for i in order
        ),
    )
    return backends[order[0]]


def seconds_of(
    backends: Sequence[AttentionBackend], batch: RaggedBatch, heads: Heads, check: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of one layer with each backend: the best of ROUNDS, in turns, after one uncounted round. Calls `check`
    after each round."""
    kv = pool_of(heads, int(batch.block_tables.max()) + 1)
    q = torch.ones(len(batch.slot_mapping), heads.num_heads, heads.head_size, dtype=heads.dtype)
    plans = [backend.plan(batch) for backend in backends]
    options: dict[str, Any] = {"sinks": torch.zeros(heads.num_heads)} if heads.sinks else {}
    best = [math.inf] * len(backends)
    for turn in range(ROUNDS + 1):
        for i, (backend, plan) in enumerate(zip(backends, plans, strict=True)):
            began = time.perf_counter()
            if heads.rank:
                attend_latent(backend, q, kv, batch, plan, heads.head_size**-0.5, heads.rank)
            else:
                backend.attend(q, kv, batch, plan, heads.head_size**-0.5, **options)
            took = time.perf_counter() - began
            best[i] = min(best[i], took) if turn else math.inf
        check()
    return best


def pool_of(heads: Heads, num_blocks: int) -> Tensor:
    """One layer's KV of the pool's type: rows of ones."""
    rows = torch.ones(num_blocks, 1 if heads.rank else 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_size)
    element = DTYPES.get(heads.pool) or getattr(torch, heads.pool)
    row_bytes = heads.head_size * element.itemsize + (SCALE_BYTES if heads.pool in DTYPES else 0)
    memory = torch.zeros(rows[..., 0].numel() * row_bytes, dtype=torch.uint8)
    kv = pool_in(memory, rows.shape[1:], heads.pool)
    for plane, written in planes(kv, rows):
        plane.copy_(written)
    return kv


def batch_of(new: Sequence[int], context: int) -> RaggedBatch:
    """Requests of `new` tokens each; `context` includes these."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.arange(len(new) * blocks, dtype=torch.int32).view(len(new), blocks)
    positions = [torch.arange(context - count, context) for count in new]
    slots = [tables[s, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE for s, at in enumerate(positions)]
    return RaggedBatch(
        cu_q=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32),
        ctx_lens=torch.full((len(new),), context, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        positions=torch.cat(positions),
        num_decodes=sum(count == 1 for count in new),
        block_size=BLOCK_SIZE,
        q_lens=list(new),
        kv_lens=[context] * len(new),
    )
