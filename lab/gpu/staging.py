"""KV between GPU and page-locked host memory: layers of scattered blocks against one plain copy of the same size."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from engine.loading.cuda_memory import CudaCopying, CudaMemory
from lab.gpu.checks import Check, failed
from net.transfer.common.memory import Region

ARENA_BYTES = 1 << 30
BUFFER_BYTES = 8 << 20
LAYER_BYTES = 64 << 10  # one layer of a block of 16 tokens, 8 KV heads of 128, K and V, bfloat16
GOAL = 0.8
Move = tuple[int, int, int]
ROUNDS = 20


def measure() -> Iterator[Check]:
    arena = torch.randint(0, 256, (ARENA_BYTES,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()  # copies do not wait for the fill
    device = CudaMemory(arena)
    with Region.shared("staging", BUFFER_BYTES) as host:
        device.pin(host)
        rows = random.Random(0).sample(range(ARENA_BYTES // LAYER_BYTES), BUFFER_BYTES // LAYER_BYTES)
        layers = [(row * LAYER_BYTES, i * LAYER_BYTES, LAYER_BYTES) for i, row in enumerate(rows)]
        whole = [(0, 0, BUFFER_BYTES)]
        yield from _content(device, arena, host, layers)
        for name, copy in (("GPU to host", device.copy_out), ("host to GPU", device.copy_in)):
            plain = gb_per_s(copy, host, whole)
            rate = gb_per_s(copy, host, layers)
            yield Check(
                "staging", f"{name}, {len(layers)} layers of {LAYER_BYTES >> 10} KiB", "GB/s", rate, plain, GOAL
            )
        device.unpin(host)


def _content(device: CudaMemory, arena: torch.Tensor, host: Region, layers: Sequence[Move]) -> Iterator[Check]:
    """Copies out, then in at the neighbouring places, and compares on the GPU."""
    device.copy_out(host, layers).wait()
    shifted = [((here + LAYER_BYTES) % ARENA_BYTES, there, length) for here, there, length in layers]
    taken = {here for here, _, _ in layers}
    kept = [move for move in shifted if move[0] not in taken]
    device.copy_in(host, kept).wait()
    sources = {there: here for here, there, _ in layers}
    wrong = sum(
        not torch.equal(arena[here : here + length], arena[sources[there] : sources[there] + length])
        for here, there, length in kept
    )
    if wrong:
        yield failed("staging", "bytes", f"{wrong} of {len(kept)} layers differ after the way out and in")
    else:
        yield Check("staging", "layers equal after the way out and in", "layers", len(kept), len(kept), 1.0)


def gb_per_s(copy: Callable[[Region, Sequence[Move]], CudaCopying], host: Region, moves: Sequence[Move]) -> float:
    """The best rate of ROUNDS; two copies are in flight, as with two buffers."""
    best = 0.0
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        first, second = copy(host, moves), copy(host, moves)
        first.wait()
        second.wait()
        best = max(best, 2 * sum(length for _, _, length in moves) / (time.perf_counter() - begun) / 1e9)
    return best
