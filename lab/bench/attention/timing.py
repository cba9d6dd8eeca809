"""Times by CUDA graph, and the ceilings of this GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

REPLAYS = 20
L2_BYTES = 128 << 20
"""Inputs rotate over at least this many bytes, so that no replay finds them in the cache."""


def median_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds over replays of one CUDA graph per call; the calls do the same computation on different memory."""
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
    """The number of input sets that together exceed the cache; at most 16."""
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
