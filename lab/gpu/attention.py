"""Judges the attention benchmark by its goals; scripts/bench.py attention measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lab.bench.attention.cases import LLAMA_8B, Case, cases
from lab.bench.attention.measured import measure as measure_rows
from lab.bench.common.results import Row
from lab.gpu.checks import Check

BLOCK_SIZE = 16
DECODE_GOAL = 0.85
"""Share of the measured copy bandwidth, if a launch moves at least 100 MB."""
SHORT_GOAL = 0.75
"""The same for several queries per request, up to lab/bench/attention/cases.SHORT."""
BLOCKS = 128
"""Tokens of a block that holds whole tiles of keys: attention/triton/hopper.py."""
PREFILL_GOAL = 0.60
"""Share of the measured GEMM rate, with chunks of at least 2,048 and heads of 128."""
PEER_GOAL = 1.0


def measure() -> Iterator[Check]:
    listed = ordered(cases(quick=False))
    for case, row in measure_rows(BLOCK_SIZE, listed):
        yield from checks_of(case, row)
    for case, row in measure_rows(BLOCKS, [case for case in listed if not case.short], peers=False):
        if case is not None:
            yield from checks_of(case, replace(row, case=f"{row.case}, blocks of {BLOCKS}"))


def ordered(listed: list[Case]) -> list[Case]:
    """Cases with goals first, because the section may run out of time."""
    return sorted(listed, key=lambda case: (case.shape != LLAMA_8B, case.context * case.requests))


def checks_of(case: Case | None, row: Row) -> Iterator[Check]:
    """Compares a rate with its ceiling, and a time with every measured peer."""
    what = f"{row.case}, {row.metric}"
    if case is None or (row.metric == "time" and not any(row.peers.values())):
        yield Check("attention", what, row.unit, row.ours, note=row.note)
    elif row.metric == "rate":
        ((ceiling, most),) = row.limits.items()
        goal = PREFILL_GOAL if not case.short else SHORT_GOAL if case.chunk > 1 else DECODE_GOAL
        judged = case.shape == LLAMA_8B and (case.short or case.chunk >= 2048)
        yield Check("attention", f"{what} of {ceiling}", row.unit, row.ours, most, goal if judged else None)
    else:
        measured = {peer: time for peer, time in row.peers.items() if time is not None}
        fastest = min(measured, key=lambda peer: measured[peer])
        judged = case.shape == LLAMA_8B and case.chunk >= 2048
        for peer, theirs in measured.items():
            rival = (judged and peer == fastest) or (peer == "flashinfer" and case.shape == LLAMA_8B)
            least = PEER_GOAL if rival else None
            yield Check("attention", f"{what} against {peer}", row.unit, row.ours, theirs, least, lower_is_better=True)
