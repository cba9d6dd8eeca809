"""Ragged batches for the attention benchmark: the locations of rows and blocks, and their minimum cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.interface import RaggedBatch


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of one layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int


SHORT = 64
"""Tokens of a chunk up to which it is compared with the memory's rate: attention/triton/short.py."""

LLAMA_8B = Shape("8B 32/8/128", 32, 8, 128)
SMOLLM2 = Shape("SmolLM2 9/3/64", 9, 3, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """`requests` equal rows of `chunk` new tokens (1 = decode) at context `context`, which includes the new tokens."""

    shape: Shape
    requests: int
    context: int
    chunk: int

    @property
    def name(self) -> str:
        kind = "decode" if self.chunk == 1 else f"{'verify' if self.short else 'prefill'} {self.chunk}"
        return f"{kind} {self.shape.name} x{self.requests} ctx {self.context}"

    @property
    def short(self) -> bool:
        """Whether reading the context bounds the time, as for a decode, and not the products."""
        return self.chunk <= SHORT

    @property
    def bytes_moved(self) -> int:
        """K and V of the context once, q and out once, two bytes each."""
        heads = 2 * self.shape.num_kv_heads * self.context + 2 * self.shape.num_heads * self.chunk
        return 2 * self.requests * heads * self.shape.head_size

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, over visible (row, key) pairs only."""
        pairs = self.chunk * (self.context - self.chunk) + self.chunk * (self.chunk + 1) // 2
        return 4 * self.requests * self.shape.num_heads * self.shape.head_size * pairs


def cases(quick: bool) -> list[Case]:
    """Decode by batch and context, drafts to verify and small chunks after a prefix, prefill by chunk and context; the
    small geometry is bound by launches."""
    decodes = [(1, 1024), (32, 4096)] if quick else [(1, 1024), (1, 32768), (32, 1024), (32, 8192), (128, 1024)]
    chunks = [(2048, 2048)] if quick else [(512, 8192), (2048, 2048), (2048, 8192), (8192, 8192), (8192, 32768)]
    drafts = (
        [(1, 32768, 5)] if quick else [(1, 32768, 5), (8, 32768, 5), (32, 8192, 5), (1, 131072, 16), (1, 32768, 64)]
    )
    listed = [Case(LLAMA_8B, requests, context, 1) for requests, context in decodes]
    listed += [Case(LLAMA_8B, requests, context, chunk) for requests, context, chunk in drafts]
    listed += [Case(LLAMA_8B, 1, context, chunk) for chunk, context in chunks]
    return [*listed, replace(listed[0], shape=SMOLLM2), replace(listed[-1], shape=SMOLLM2)]


def batch_of(case: Case, block_size: int, device: str) -> tuple[RaggedBatch, int]:
    """The batch, with blocks in shuffled order, and the number of blocks its pool needs."""
    per_request = -(-case.context // block_size)
    num_blocks, rows = case.requests * per_request, case.requests * case.chunk
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = order.view(case.requests, per_request)
    position = torch.arange(case.context - case.chunk, case.context)
    slots = tables[:, position // block_size] * block_size + position % block_size
    counts = torch.arange(case.requests + 1) * case.chunk
    batch = RaggedBatch(
        cu_q=counts.to(torch.int32).to(device),
        ctx_lens=torch.full((case.requests,), case.context, dtype=torch.int32).to(device),
        block_tables=tables.to(torch.int32).to(device),
        slot_mapping=slots.flatten().to(device),
        positions=position.repeat(case.requests).to(device),
        num_decodes=case.requests if case.chunk == 1 else 0,
        block_size=block_size,
        q_lens=[case.chunk] * case.requests,
        kv_lens=[case.context] * case.requests,
    )
    assert len(batch.slot_mapping) == rows
    return batch, num_blocks


def tensors_of(case: Case, num_blocks: int, block_size: int, device: str) -> tuple[Tensor, Tensor]:
    """Random q [T, num_heads, head_size] and one layer's kv."""
    shape = case.shape
    q = torch.randn(case.requests * case.chunk, shape.num_heads, shape.head_size, device=device)
    kv = torch.randn(num_blocks, 2, shape.num_kv_heads, block_size, shape.head_size, device=device)
    return q.to(torch.bfloat16), kv.to(torch.bfloat16)
