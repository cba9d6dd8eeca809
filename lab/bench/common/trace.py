"""Rows of a trace as requests of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from lab.bench.common.workload import BLOCK, Spec, TokenSource
from lab.loads.trace import BLOCK_TOKENS, TraceRow


def trace_specs(
    rows: Iterable[TraceRow], source: TokenSource, count: int, time_scale: float, length_scale: float
) -> list[Spec]:
    """The first `count` rows as requests.

    time_scale multiplies timestamps (0.5 = twice the rate); length_scale multiplies all lengths and the block, so
    that shared prefixes keep their share of the prompt on a machine too small for the original.
    """
    if not time_scale >= 0 or not 0 < length_scale <= 1:
        raise ValueError("--time-scale must not be negative, --length-scale must be in (0, 1]")
    block = max(1, round(BLOCK_TOKENS * length_scale))
    specs: list[Spec] = []
    for row in islice(rows, count):
        length = max(1, round(row.input_length * length_scale))
        tokens: list[int] = []
        for hash_id in row.hash_ids:
            if len(tokens) >= length:
                break
            tokens += source.tokens(block, BLOCK, hash_id)
        at_s = row.timestamp_ms / 1000 * time_scale
        specs.append(Spec(tokens[:length], max(1, round(row.output_length * length_scale)), at_s))
    return sorted(specs, key=lambda spec: spec.at_s)
