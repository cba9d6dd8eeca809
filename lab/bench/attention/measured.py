"""Timing of attention on a GPU: ours, its peers, and the ceilings of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from attention.triton.backend import TritonBackend
from lab.bench.attention.cases import Case, batch_of, cases, tensors_of
from lab.bench.attention.peers import peer_seconds
from lab.bench.attention.timing import copies_for, copy_rate, gemm_rate, median_seconds
from lab.bench.common.results import Row

LAUNCH_BOUND_BYTES = 100 << 20
"""Decodes and short chunks that move less are reported as microseconds only."""


def measured_rows(block_size: int, quick: bool) -> list[Row]:
    return [row for _, row in measure(block_size, cases(quick))]


def measure(block_size: int, listed: list[Case], *, peers: bool = True) -> Iterator[tuple[Case | None, Row]]:
    """Yields each row with its case; the ceilings come first. Needs a GPU."""
    copy_gb_s, gemm_tflop_s = copy_rate(), gemm_rate()
    yield None, Row("ceiling", "device copy", "GB/s", copy_gb_s, note="copy counts bytes read and written")
    yield None, Row("ceiling", "bf16 GEMM 8192", "TFLOP/s", gemm_tflop_s)
    for case in listed:
        seconds = time_ours(case, block_size)
        others = peer_seconds(case, block_size) if peers else {}
        yield case, Row(case.name, "time", "us", seconds * 1e6, {name: to_us(peer) for name, peer in others.items()})
        if not case.short:
            rate = case.operations / seconds / 1e12
            yield case, Row(case.name, "rate", "TFLOP/s", rate, limits={"GEMM": gemm_tflop_s})
        elif case.bytes_moved >= LAUNCH_BOUND_BYTES:
            rate = case.bytes_moved / seconds / 1e9
            yield case, Row(case.name, "rate", "GB/s", rate, limits={"copy": copy_gb_s})


def to_us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def time_ours(case: Case, block_size: int) -> float:
    """Seconds of one layer's attend, with the plan made before, as for every layer except the first."""
    batch, num_blocks = batch_of(case, block_size, "cuda")
    backend, scale = TritonBackend(), case.shape.head_size**-0.5
    plan = backend.plan(batch)

    def call(q: Tensor, kv: Tensor) -> Callable[[], object]:
        return lambda: backend.attend(q, kv, batch, plan, scale)

    inputs = [tensors_of(case, num_blocks, block_size, "cuda") for _ in range(copies_for(case.bytes_moved))]
    seconds: float = median_seconds([call(q, kv) for q, kv in inputs])
    return seconds
