"""The chunks of a long prompt on a pipeline of nodes, each of which computes some of the layers. Pure.

Chunk k passes one stage in t_k seconds. A stage takes the next chunk when it has finished one, so the last of P stages
ends after the

    makespan = sum t_k + (P - 1) max t_k                                            (reference, section 7)

which is exact if a chunk takes equally long on every stage. Equal chunks are not equal stages: attention over the
tokens before a chunk makes late chunks slower, and the slowest one counts P - 1 times more. A chunk of x tokens after L
others takes

    t = a0 + a1 x + a2 x (x + 2 L)                                                   (sched/cost.py)

so chunks become shorter with depth: `next_chunk` solves a2 x^2 + (a1 + 2 a2 L) x = T for the time T of the first chunk.
The fixed time a0 does not become shorter with the chunk. `plan` therefore tries several sizes of the first chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import sqrt

from sched.cost import prefill_seconds

Coefficients = Sequence[float]
"""a0, a1, a2 of a node's prefill model: seconds, seconds per token, seconds per attended pair of tokens."""

LEAST_CHUNK_TOKENS = 128
"""Smaller chunks do not fill the matrix products of any machine: on a CPU with AVX-512, 64 tokens at a time take a
quarter more than 512, 128 a sixteenth."""

LEAST_SHARE = 4
"""A chunk has at least this part of the tokens of the first one: below that its fixed time, which the cost model knows
only roughly, would decide."""


def next_chunk(done: int, first: int, cost: Coefficients, smoothing: float = 1.0, align: int = 1) -> int:
    """Tokens of the chunk after `done` tokens that takes as long as a first chunk of `first` tokens.

    smoothing: 0 = always `first`, 1 = the solution of the equation. The result is a multiple of `align` tokens, at
    least one of them, at least 1 / LEAST_SHARE of `first`, and no less than LEAST_CHUNK_TOKENS if `first` is not."""
    _, linear, quadratic = cost
    slope = linear + 2 * quadratic * done
    target = linear * first + quadratic * first * first
    if quadratic <= 0 or slope <= 0:
        size = float(first)
    else:
        size = (sqrt(slope * slope + 4 * quadratic * target) - slope) / (2 * quadratic)
    wanted = max(first + smoothing * (size - first), first / LEAST_SHARE, min(first, LEAST_CHUNK_TOKENS))
    return max(align, int(wanted + 1e-6) // align * align)


def chunk_sizes(
    tokens: int, done: int, first: int, cost: Coefficients, smoothing: float = 1.0, align: int = 1
) -> list[int]:
    """Tokens of each chunk of a prompt of which `done` of `tokens` are known. The last chunk takes what is left; it is
    never a single token, because a row of one token is a decode to the attention kernels."""
    sizes: list[int] = []
    while done < tokens:
        size = min(next_chunk(done, first, cost, smoothing, align), tokens - done)
        if tokens - done - size == 1:
            size += 1
        sizes.append(size)
        done += size
    return sizes


def stage_seconds(sizes: Sequence[int], done: int, cost: Coefficients, share: float) -> list[float]:
    """Seconds of each chunk on a stage with `share` of the layers. The fixed time of a step is paid on every stage."""
    starts = accumulate(sizes, initial=done)
    fixed, rest = cost[0], (0.0, cost[1], cost[2])
    return [fixed + share * prefill_seconds(rest, size, start) for size, start in zip(sizes, starts, strict=False)]


def makespan(seconds: Sequence[float], stages: int) -> float:
    """Seconds from the begin of the first chunk on the first of `stages` stages to the end of the last chunk on the
    last one, if a chunk takes `seconds[k]` on every stage."""
    return sum(seconds) + (stages - 1) * max(seconds, default=0.0)


def plan(tokens: int, done: int, stages: int, cost: Coefficients, most: int, align: int = 1) -> list[int]:
    """The sizes of chunks with the least makespan on `stages` equal stages, each at most `most` tokens.

    Large first chunks make the pipeline fill slowly, small ones pay the fixed time of a step more often: sizes from
    `most` downwards by halves are compared."""
    best: list[int] = []
    best_s = float("inf")
    first = max(align, most // align * align)
    while True:
        sizes = chunk_sizes(tokens, done, first, cost, align=align)
        seconds = makespan(stage_seconds(sizes, done, cost, 1 / stages), stages)
        if seconds < best_s:
            best, best_s = sizes, seconds
        if first // 2 < max(align, LEAST_CHUNK_TOKENS):
            return best
        first = max(align, first // 2 // align * align)
