"""The gated delta rule on the CPU: our C++ kernels at each level of this CPU next to torch, over states in a pool.

  scripts/bench.py delta
  scripts/bench.py delta --quick --threads 2

Heads are those of Qwen3-Next-80B-A3B (a decay of each head) and Kimi-Linear-48B-A3B (of each channel of the key), one
layer. Decodes are of several requests, over states that together exceed the last cache; chunks are of one request. The
convolution and the projections of a layer are not part of it. Calls take turns, and the best of several rounds counts.

Limits, for the same number of threads:
    update   GB/s of reading and writing memory in place by torch, as decodes do with their states
    GEMM     GFLOP/s of a product in float32 by torch (lab/bench/ops/limits.py). Chunks count the multiply-adds of
             the recurrence: three for each element of a state and token
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attention.cpu.delta_rule import CpuRule
from attention.cpu.level import levels_here
from attention.delta_states import Rule, Tokens, TorchRule
from attention.states import Place, StateSlots
from lab.bench.attention.on_cpu import best_seconds
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.ops.limits import gemm_rate
from lab.flag_types import positive

POOL_BYTES = 256 << 20
"""The states of all sets of requests; one set has some requests."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one layer."""

    name: str
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    by_channel: bool

    @property
    def elements(self) -> int:
        """Of a state."""
        return self.value_heads * self.key_size * self.value_size


QWEN = Heads("Qwen3-Next", 16, 32, 128, 128, by_channel=False)
KIMI = Heads("Kimi Linear", 32, 32, 128, 128, by_channel=True)


def tokens_of(heads: Heads, count: int) -> Tokens:
    """Random, q, k and v parts of one row, in bfloat16."""
    keys, values = heads.key_heads * heads.key_size, heads.value_heads * heads.value_size
    q, k, v = torch.randn(count, 2 * keys + values).bfloat16().split((keys, keys, values), 1)
    gates = (count, heads.value_heads, heads.key_size) if heads.by_channel else (count, heads.value_heads)
    return Tokens(
        q.unflatten(1, (heads.key_heads, heads.key_size)),
        k.unflatten(1, (heads.key_heads, heads.key_size)),
        v.unflatten(1, (heads.value_heads, heads.value_size)),
        -torch.rand(gates),
        torch.rand(count, heads.value_heads).bfloat16(),
    )


def decodes(rule: Rule, heads: Heads, memory: Tensor, requests: int) -> list[Callable[[], object]]:
    """One call for each set of requests in the memory."""
    place = Place(memory, StateSlots(((0, 0, heads.elements),)))
    tokens, fresh = tokens_of(heads, requests), torch.zeros(requests, dtype=torch.bool)
    out = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    sets = torch.arange(len(memory) // requests * requests).view(-1, requests, 1)
    return [partial(rule.step, tokens, place, blocks, fresh, blocks, out) for blocks in sets]


def chunk(rule: Rule, heads: Heads, memory: Tensor, count: int) -> list[Callable[[], object]]:
    place, blocks = Place(memory, StateSlots(((0, 0, heads.elements),))), torch.zeros(1, 1, dtype=torch.int64)
    tokens = tokens_of(heads, count)
    out = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    return [partial(rule.chunk, tokens, place, blocks, None, blocks, out)]


def update_rate() -> float:
    """GB/s of memory that is read and written in place, both counted."""
    memory = torch.ones(POOL_BYTES // 4)
    (best,) = best_seconds([partial(part.mul_, 1.0) for part in memory.split(4 << 20)])
    return 2 * POOL_BYTES / sum(best) / 1e9


def rows_of(levels: Sequence[str], threads: int, quick: bool) -> list[Row]:
    torch.set_num_threads(threads)
    update, gemm, rows = update_rate(), gemm_rate(torch.float32, threads), []
    rules: list[Rule] = [*map(CpuRule, levels), TorchRule()]
    for heads in (QWEN, KIMI):
        memory = torch.zeros(POOL_BYTES // (4 * heads.elements), heads.elements)
        for requests in (1, 8) if quick else (1, 8, 32):
            *ours, theirs = best_seconds(*(decodes(rule, heads, memory, requests) for rule in rules))
            torchs, moved = sum(theirs) / len(theirs), 2 * 4 * heads.elements * requests
            for level, each in zip(levels, ours, strict=True):
                took, case = sum(each) / len(each), f"{heads.name}, {requests} decodes, {level}, {threads} threads"
                rows.append(Row(case, "time", "us", 1e6 * took, {"torch": 1e6 * torchs}))
                rows.append(Row(case, "rate", "GB/s", moved / took / 1e9, limits={"update": update}))
        for count in (128,) if quick else (16, 128, 512, 2048):
            *ours, theirs = best_seconds(*(chunk(rule, heads, memory, count) for rule in rules))
            for level, (took,) in zip(levels, ours, strict=True):
                case = f"{heads.name}, chunk of {count}, {level}, {threads} threads"
                operations = 6 * heads.elements * count
                rows.append(Row(case, "time", "us", 1e6 * took, {"torch": 1e6 * theirs[0]}))
                rows.append(Row(case, "rate", "GFLOP/s", operations / took / 1e9, limits={"GEMM": gemm}))
    return rows


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="torch threads, one run for each")
    parser.add_argument("--cpu-level", nargs="+", help="levels to measure; default: all of this CPU")
    args = parser.parse_args(argv)
    args.cpu_level = args.cpu_level or levels_here()
    if missing := set(args.cpu_level) - set(levels_here()):
        parser.error(f"--cpu-level {', '.join(missing)}: this CPU has {', '.join(levels_here()) or 'none'}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    torch.set_grad_enabled(False)
    rows = [row for count in args.threads for row in rows_of(args.cpu_level, count, args.quick)]
    report({"benchmark": "delta", "threads": args.threads, "levels": args.cpu_level}, rows, args.json)
    return 0
