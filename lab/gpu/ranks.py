"""Tensor-parallel ranks: an arena whose heads are on two GPUs, and nodes with --tensor-parallel-size 2.

With one GPU it holds both parts of the arena, which still checks the bytes; nodes of two ranks are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from engine.loading.split_arena import SplitArena
from engine.loading.split_memory import SplitMemory
from engine.model.gpu import Cuda
from lab.gpu.checks import Check, failed, skipped
from lab.gpu.serving import compared, lacking
from lab.gpu.staging import BUFFER_BYTES, ROUNDS, gb_per_s
from net.transfer.common.memory import Region

HEADS, HEAD_BYTES = 8, 4096  # bytes of one head: 16 tokens of 128 numbers in bfloat16, as in Llama-3-8B
PLANES = 1 << 14
LAYER_BYTES = 2 * HEADS * HEAD_BYTES
TWO = ("--tensor-parallel-size", "2")
LAYOUTS = {
    "one node of two ranks": ("mixed=1", TWO),
    "two ranks each: prefill + decode + store": ("prefill=1,decode=1,store=1", TWO),
}


def measure() -> Iterator[Check]:
    yield from _split_arena()
    if torch.cuda.device_count() < 2:
        yield skipped("ranks", "nodes with --tensor-parallel-size 2", "torch sees one GPU")
    elif missing := lacking():
        yield skipped("ranks", "nodes with --tensor-parallel-size 2", f"not installed: {', '.join(missing)}")
    else:
        yield from compared("ranks", LAYOUTS)  # with one GPU per rank, over NCCL


def _split_arena() -> Iterator[Check]:
    """Copies layers of blocks out and in through page-locked memory, compared with one plain copy."""
    gpus = [0, torch.cuda.device_count() - 1]
    parts = [
        torch.randint(0, 256, (PLANES * HEAD_BYTES * HEADS // 2,), dtype=torch.uint8, device=f"cuda:{gpu}")
        for gpu in gpus
    ]
    heads = [slice(0, HEADS // 2), slice(HEADS // 2, HEADS)]
    device = SplitMemory(SplitArena(parts, heads, HEADS, HEAD_BYTES, Cuda()))
    where = f"arena on cuda:{gpus[0]} and cuda:{gpus[1]}"
    rows = random.Random(0).sample(range(device.nbytes // LAYER_BYTES), BUFFER_BYTES // LAYER_BYTES)
    layers = [(row * LAYER_BYTES, i * LAYER_BYTES, LAYER_BYTES) for i, row in enumerate(rows)]
    with Region.shared("staging", BUFFER_BYTES) as host:
        device.pin(host)
        wrong = _wrong_bytes(device, parts, host, layers)
        if wrong:
            yield failed("ranks", f"bytes of an {where}", f"{wrong} bytes differ after the way out and in")
        else:
            yield Check("ranks", f"{where}: layers equal", "layers", len(layers), len(layers), 1.0)
        plain = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        ceiling = _plain_gb_per_s(parts[0], plain)
        for name, copy in (("to host", device.copy_out), ("from host", device.copy_in)):
            yield Check("ranks", f"{where}, layers {name}", "GB/s", gb_per_s(copy, host, layers), ceiling)
        device.unpin(host)


def _wrong_bytes(
    device: SplitMemory, parts: list[torch.Tensor], host: Region, layers: list[tuple[int, int, int]]
) -> int:
    """Copies out, overwrites all parts, copies in again; returns the number of different bytes in the layers."""
    kept = [part.clone() for part in parts]
    for gpu in {part.device for part in parts}:
        torch.cuda.synchronize(gpu)  # copies do not wait for the fill
    device.copy_out(host, layers).wait()
    for part in parts:
        part.zero_()
    for gpu in {part.device for part in parts}:
        torch.cuda.synchronize(gpu)
    device.copy_in(host, layers).wait()
    wrong = 0
    for part, old in zip(parts, kept, strict=True):
        mine = LAYER_BYTES // len(parts)
        chosen = torch.tensor([here // LAYER_BYTES for here, _, _ in layers], device=part.device)
        wrong += int((part.view(-1, mine)[chosen] != old.view(-1, mine)[chosen]).sum())
    return wrong


def _plain_gb_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """The best rate of ROUNDS copies of `target`'s size out of one GPU."""
    best = 0.0
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source[: len(target)], non_blocking=True)
        end.record()
        end.synchronize()
        best = max(best, len(target) / begin.elapsed_time(end) / 1e6)
    return best
