"""A cost model of a compiled attention kernel: the cycles that one turn of its main loop takes on a multiprocessor.

    products    operations of the loop's matrix products / rate of the tensor cores
    issue       instructions of all warps / 4 per cycle
    special     exponentials / rate of their unit
    copies      bytes of the turn's keys and values / the multiprocessor's share of the L2 cache's rate, or, for kernels
                that read each key once, of the memory's

A program whose warps wait for the same products pays products and the larger of issue and special, one after the
other. Where two programs, or two warp groups of one, run on the multiprocessor, one computes while the other waits, and
the largest of the four decides. The model knows no latencies, so it is a bound: the kernel is not faster than this.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention.triton import aot
from lab.bench.attention.sass import Loop, loops_of

KIB = 1024
READ_ONCE = ("decode_kernel", "short_kernel")
WARPS_OF_A_GROUP = 4


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published rates, per multiprocessor and cycle if not said otherwise."""

    multiprocessors: int
    operations: int  # of bfloat16 products
    special: int  # exponentials
    l2_bytes: float
    memory_bytes: float
    shared: int  # bytes, of all programs together


GPUS = {
    80: Gpu(108, 2048, 16, 5120 / 108, 1555e9 / 1.41e9 / 108, 164 * KIB),  # A100
    86: Gpu(84, 512, 16, 2048 / 84, 768e9 / 1.74e9 / 84, 100 * KIB),  # A40
    90: Gpu(132, 4096, 16, 5120 / 132, 3350e9 / 1.755e9 / 132, 228 * KIB),  # H100 SXM
}
"""By compute capability."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Cycles of one turn of one program."""

    products: float
    issue: float
    special: float
    copies: float
    resident: int  # programs on a multiprocessor at the same time
    groups: int  # of warps that need not wait for one another, in all resident programs
    loop: Loop

    @property
    def cycles(self) -> float:
        if self.groups > 1:
            return max(self.products, self.issue, self.special, self.copies)
        return max(self.products + max(self.issue, self.special), self.copies)


def turn_of(launch: aot.Launch, capability: int) -> Turn | None:
    """The model of a launch; None for a kernel without matrix products of half types."""
    kernel, _ = aot.build(launch, capability)
    gpu, used, constants = GPUS[capability], aot.resources(launch, capability), launch.arguments
    loops = loops_of(kernel.asm["cubin"])
    if not loops:
        return None
    specialized = used.threads > 32 * launch.options["num_warps"]
    if not specialized:  # of a loop with masks and one without, the one without is the main one
        loops = [min(loops, key=lambda loop: loop.instructions / loop.operations)]
    warps = WARPS_OF_A_GROUP if specialized else used.threads // 32
    resident = resident_programs(used, gpu)
    pool = constants["kv"]
    read = 2 * constants["KEYS"] * constants["HEAD_SIZE"] * pool.itemsize
    rate = gpu.memory_bytes if launch.kernel.fn.__name__ in READ_ONCE else gpu.l2_bytes
    return Turn(
        products=warps * sum(loop.operations for loop in loops) / gpu.operations,
        issue=warps * sum(loop.instructions for loop in loops) / 4,
        special=warps * sum(loop.special for loop in loops) * 32 / gpu.special,
        copies=read / rate,
        resident=resident,
        groups=resident * len(loops),
        loop=loops[0],
    )


def resident_programs(used: aot.Resources, gpu: Gpu) -> int:
    """Programs that fit on a multiprocessor by registers, shared memory and threads."""
    by_registers = 65536 // (-(-used.registers // 8) * 8 * used.threads)
    by_shared = gpu.shared // (used.shared_bytes + KIB)
    return max(1, min(by_registers, by_shared, 2048 // used.threads))
