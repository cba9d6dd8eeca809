"""The peers in the measurement: torch's fused attention, FlexAttention and, if installed, FlashInfer.

SDPA and FlexAttention get K and V as dense tensors, so they save the block table, which ours and FlashInfer pay for. A
peer that is not installed, or refuses a shape, gives None.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lab.bench.attention.cases import Case, batch_of, tensors_of
from lab.bench.attention.timing import copies_for, median_seconds

SDPA = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
FLASHINFER_WORKSPACE_BYTES = 256 << 20


def peer_seconds(case: Case, block_size: int) -> dict[str, float | None]:
    """Seconds by name of the peer."""
    times = {name: time_sdpa(case, backend) for name, backend in SDPA.items()}
    return times | {"flex": time_flex(case), "flashinfer": time_flashinfer(case, block_size)}


def time_sdpa(case: Case, backend: SDPBackend) -> float | None:
    """torch's fused attention on K and V that are dense already; None if the back end refuses. torch has no causal form
    for a chunk after a past, so it gets the chunk alone plus the past without a mask: equal work, but another
    result."""
    shape, past = case.shape, case.context - case.chunk
    if case.chunk == 1:
        past = 0
    scale = shape.head_size**-0.5

    def call() -> Callable[[], object]:
        q = torch.randn(case.requests, shape.num_heads, case.chunk, shape.head_size, device="cuda").bfloat16()
        k, v = torch.randn(
            2, case.requests, shape.num_kv_heads, case.context, shape.head_size, device="cuda"
        ).bfloat16()

        def run() -> None:
            with sdpa_kernel(backend):
                causal = case.chunk > 1
                if past:
                    old = (k[:, :, :past], v[:, :, :past])
                    scaled_dot_product_attention(q, *old, scale=scale, enable_gqa=True)
                new = (k[:, :, past:], v[:, :, past:])
                scaled_dot_product_attention(q, *new, is_causal=causal, scale=scale, enable_gqa=True)

        return run

    try:
        seconds: float = median_seconds([call() for _ in range(copies_for(case.bytes_moved))])
        return seconds
    except RuntimeError:  # "No available kernel": this back end does not take these shapes on this GPU
        return None


def time_flex(case: Case) -> float | None:
    """FlexAttention, compiled for the case; a chunk attends to its past and, causally, to itself, as ours does."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape, past = case.shape, case.context - case.chunk
    torch._dynamo.reset()  # one shape at a time: no recompilation limit, no dynamic shapes
    compiled = torch.compile(flex_attention, dynamic=False)

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = key <= row + past
        return seen

    def call() -> Callable[[], object]:
        q = torch.randn(case.requests, shape.num_heads, case.chunk, shape.head_size, device="cuda").bfloat16()
        kv = (2, case.requests, shape.num_kv_heads, case.context, shape.head_size)
        k, v = torch.randn(kv, device="cuda").bfloat16()
        return lambda: compiled(q, k, v, block_mask=mask, scale=shape.head_size**-0.5, enable_gqa=True)

    try:
        mask = None
        if case.chunk > 1:
            mask = create_block_mask(visible, None, None, case.chunk, case.context, device="cuda")
        seconds: float = median_seconds([call() for _ in range(copies_for(case.bytes_moved))])
        return seconds
    except RuntimeError:  # the compiler refuses, or memory is short
        return None


def time_flashinfer(case: Case, block_size: int) -> float | None:
    """FlashInfer's paged kernels over the pool that ours reads: its HND layout is our block layout of one layer."""
    if find_spec("flashinfer") is None:
        return None
    import flashinfer

    batch, num_blocks = batch_of(case, block_size, "cuda")
    used = torch.tensor([-(-n // block_size) for n in batch.kv_lens])
    indptr = torch.cat((torch.zeros(1), used.cumsum(0))).to("cuda", torch.int32)
    indices = batch.block_tables.flatten()
    last = torch.tensor([(n - 1) % block_size + 1 for n in batch.kv_lens], dtype=torch.int32, device="cuda")
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    shape = case.shape
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_size, block_size)
    wrapper: Any
    if case.chunk == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *heads, q_data_type=torch.bfloat16)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(batch.cu_q, indptr, indices, last, *heads, causal=True, q_data_type=torch.bfloat16)

    def call(q: Tensor, kv: Tensor) -> Callable[[], object]:
        return lambda: wrapper.run(q, kv)

    inputs = [tensors_of(case, num_blocks, block_size, "cuda") for _ in range(copies_for(case.bytes_moved))]
    seconds: float = median_seconds([call(q, kv) for q, kv in inputs])
    return seconds
