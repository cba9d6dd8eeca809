"""Times of one backend and of the built-in ones, on any device.

A step is the work of one layer: write_kv and attend, with the plan made before. Backends take turns in every repeat, so
that slow drifts of the machine affect all of them; a time is the median of the repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from attention.interface import AttentionBackend
from lab.bench.attention.cases import LLAMA_8B, SMOLLM2, Case, batch_of, tensors_of
from lab.bench.common.results import Row

BLOCK_SIZE = 16
REPEATS, QUICK_REPEATS = 15, 5


def small_cases(quick: bool) -> list[Case]:
    """Sizes that a laptop computes in milliseconds."""
    cases = [Case(SMOLLM2, 1, 1024, 1), Case(SMOLLM2, 8, 1024, 1), Case(SMOLLM2, 1, 512, 512)]
    if not quick:
        cases += [Case(SMOLLM2, 32, 1024, 1), Case(SMOLLM2, 1, 2048, 512), Case(SMOLLM2, 1, 2048, 2048)]
        cases += [Case(LLAMA_8B, 8, 1024, 1), Case(LLAMA_8B, 1, 512, 512)]
    return cases


def compare(mine: AttentionBackend, others: Mapping[str, AttentionBackend], device: str, quick: bool) -> list[Row]:
    """Milliseconds of every case, `others` as peers."""
    rows = []
    for case in small_cases(quick):
        calls = {"": step_of(mine, case, device)}
        calls |= {name: step_of(backend, case, device) for name, backend in others.items()}
        times = alternate(calls, device, QUICK_REPEATS if quick else REPEATS)
        ours = times.pop("")
        rows.append(Row(case.name, "write + attend", "ms", ours, dict(times)))
        if case.chunk > 1:
            rows.append(Row(case.name, "rate", "GFLOP/s", case.operations / ours / 1e6))
        else:
            rows.append(Row(case.name, "rate", "GB/s", case.bytes_moved / ours / 1e6))
    return rows


def step_of(backend: AttentionBackend, case: Case, device: str) -> Callable[[], object]:
    batch, num_blocks = batch_of(case, BLOCK_SIZE, device)
    q, kv = tensors_of(case, num_blocks, BLOCK_SIZE, device)
    shape = (len(q), case.shape.num_kv_heads, case.shape.head_size)
    k, v = torch.randn(2, *shape, device=device).to(kv.dtype)
    plan, scale = backend.plan(batch), case.shape.head_size**-0.5

    def step() -> None:
        backend.write_kv(k, v, kv, batch, plan)
        backend.attend(q, kv, batch, plan, scale)

    return step


def alternate(calls: Mapping[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Median milliseconds of each call; the first two turns warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begun) * 1e3)
    return {name: median(values[2:]) for name, values in times.items()}
