"""Timing of attention on a GPU: ours, torch's back ends on dense K and V, and the ceilings of the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention.triton_backend import TritonBackend
from attention_bench.cases import Case, batch_of, cases, tensors_of
from benchlib.results import Row

REPLAYS = 20
L2_BYTES = 128 << 20
"""Inputs rotate over at least this many bytes, so that no replay finds them in the cache."""

SDPA = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
LAUNCH_BOUND_BYTES = 100 << 20
"""Decodes that move less are reported as microseconds only."""


def measured_rows(block_size: int, quick: bool) -> list[Row]:
    copy_gb_s, gemm_tflop_s = copy_rate(), gemm_rate()
    rows = [
        Row("ceiling", "device copy", "GB/s", copy_gb_s, note="copy counts bytes read and written"),
        Row("ceiling", "bf16 GEMM 8192", "TFLOP/s", gemm_tflop_s),
    ]
    for case in cases(quick):
        seconds = time_ours(case, block_size)
        peers = {name: time_sdpa(case, backend) for name, backend in SDPA.items()}
        rows.append(Row(case.name, "time", "us", seconds * 1e6, {name: to_us(peer) for name, peer in peers.items()}))
        if case.chunk > 1:
            rate = case.operations / seconds / 1e12
            rows.append(Row(case.name, "rate", "TFLOP/s", rate, limits={"GEMM": gemm_tflop_s}))
        elif case.bytes_moved >= LAUNCH_BOUND_BYTES:
            rate = case.bytes_moved / seconds / 1e9
            rows.append(Row(case.name, "rate", "GB/s", rate, limits={"copy": copy_gb_s}))
    return rows


def to_us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def median_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median over replays of one CUDA graph per call; the calls compute the same on different memory."""
    graphs = []
    for call in calls:
        call()  # compiles, and fills the caches of libraries
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    times: list[float] = []
    for replay in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs[replay % len(graphs)].replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[3:])[REPLAYS // 2]


def copies_for(num_bytes: int) -> int:
    """How many input sets together exceed the cache; at most 16."""
    return min(16, 1 + L2_BYTES // max(num_bytes, 1))


def copy_rate() -> float:
    """GB/s of a device-to-device copy of 1 GiB, bytes read plus bytes written."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds([lambda: target.copy_(source)]) / 1e9


def gemm_rate(size: int = 8192) -> float:
    """TFLOP/s of a square bfloat16 product of random matrices."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_seconds([lambda: a @ b]) / 1e12


def time_ours(case: Case, block_size: int) -> float:
    """One layer's attend, its plan made beforehand as for every layer but the first."""
    batch, num_blocks = batch_of(case, block_size, "cuda")
    backend, scale = TritonBackend(), case.shape.head_size**-0.5
    plan = backend.plan(batch)

    def call(q: Tensor, kv: Tensor) -> Callable[[], object]:
        return lambda: backend.attend(q, kv, batch, plan, scale)

    inputs = [tensors_of(case, num_blocks, block_size, "cuda") for _ in range(copies_for(case.bytes_moved))]
    return median_seconds([call(q, kv) for q, kv in inputs])


def time_sdpa(case: Case, backend: SDPBackend) -> float | None:
    """torch's fused attention on K and V that are dense already; None where the back end refuses. A chunk over a past
    has no causal form in torch, so it is given the chunk alone plus the past without mask: equal work, not equal
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
        return median_seconds([call() for _ in range(copies_for(case.bytes_moved))])
    except RuntimeError:  # "No available kernel": this back end does not take these shapes on this GPU
        return None
