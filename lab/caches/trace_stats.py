"""The reuse in a trace: its distribution over requests and blocks, and whether a pool pays.

  scripts/tools.py trace-stats                          # the conversation trace
  scripts/tools.py trace-stats --trace mine.jsonl --nodes 8 --node-blocks 6000 --json stats.json

The mean hit rate hides that a few requests find almost all of their tokens and many find none, so the command shows
quantiles and shares. It judges a pool by the model's prefill seconds: requests spread over nodes with separate caches,
compared with one pool of all their memory whose blocks are fetched. It measures no times.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cache.pool.policies import policies
from cache.pool.policy import Facts
from lab.bench.common.results import numbers, write_result
from lab.formulas.loads import pooled
from lab.loads.trace import BLOCK_TOKENS, TraceRow, read_trace
from lab.loads.traces import HINT, find_trace
from lab.simulator.models.caches import Cache
from lab.simulator.models.presets import preset
from lab.simulator.models.step_models import StepModel

MIN_SAVED_SHARE = 0.05
"""Share of the prefill seconds that a pool must save to be worth its traffic."""


def statistics(rows: Sequence[TraceRow], model: StepModel, nodes: int, node_blocks: int) -> dict[str, Any]:
    """JSON-ready. Shares refer to tokens unless their names say requests or blocks."""
    prompt = np.array([row.input_length for row in rows], dtype=np.float64)
    ceiling = pooled(rows, 1 + sum(len(row.hash_ids) for row in rows))
    share = ceiling / prompt
    uses = Counter(block for row in rows for block in row.hash_ids)
    times = np.sort(np.array(list(uses.values())))[::-1]
    again = times - 1
    alone, global_pool = spread(rows, nodes, node_blocks), pooled(rows, nodes * node_blocks)
    none_s, alone_s, pool_s = (_prefill_s(model, rows, found) for found in (np.zeros(len(rows)), alone, global_pool))
    fetch_s = float(global_pool.sum()) * model.token_bytes / model.nic_bytes_s
    total = float(prompt.sum())
    return {
        "requests": len(rows),
        "seconds": (max(r.timestamp_ms for r in rows) - min(r.timestamp_ms for r in rows)) / 1000,
        "prompt_tokens": _quantiles(prompt),
        "output_tokens": _quantiles(np.array([row.output_length for row in rows], dtype=np.float64)),
        "blocks": int(times.sum()),
        "distinct_blocks": len(times),
        "used_once": float(np.mean(times == 1)),
        "reuses_of_top_1_percent": float(again[: max(1, len(again) // 100)].sum() / max(1, again.sum())),
        "hit_rate_ceiling": float(ceiling.sum()) / total,
        "requests_without_hit": float(np.mean(ceiling == 0)),
        "hit_share_of_requests": _quantiles(share),
        "hit_rate_alone": float(alone.sum()) / total,
        "hit_rate_pool": float(global_pool.sum()) / total,
        "prefill_s": {"no cache": none_s, "alone": alone_s, "pool": pool_s + fetch_s},
        "pool_saves": 1 - (pool_s + fetch_s) / alone_s,
    }


def spread(rows: Sequence[TraceRow], nodes: int, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[requests]: tokens found when requests go in turn to nodes with separate LRU caches."""
    caches, facts = [Cache(policies["lru"](), blocks) for _ in range(nodes)], Facts(0, 1.0)
    found = []
    for turn, row in enumerate(rows):
        cache = caches[turn % nodes]
        found.append(min(cache.run(row.hash_ids), (row.input_length - 1) // BLOCK_TOKENS) * BLOCK_TOKENS)
        full = row.hash_ids[: row.input_length // BLOCK_TOKENS] or row.hash_ids
        cache.use(full, [facts] * len(full))
    return np.array(found, dtype=np.float64)


def _prefill_s(model: StepModel, rows: Sequence[TraceRow], found: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    pairs = zip(rows, found.astype(int).tolist(), strict=True)
    return sum(model.prompt_s(row.input_length - known, known) for row, known in pairs)


def _quantiles(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    at = (10, 25, 50, 75, 90, 99)
    found = np.percentile(values, at).tolist()
    return {"mean": float(values.mean())} | {f"p{q}": value for q, value in zip(at, found, strict=True)}


def verdict(stats: dict[str, Any]) -> str:
    saves, best = stats["pool_saves"], stats["hit_rate_ceiling"]
    seconds = stats["prefill_s"]
    pays = "pays" if saves >= MIN_SAVED_SHARE else "does not pay"
    return (
        f"A pool {pays} here: with its fetches it takes {seconds['pool']:.0f} "
        f"prefill seconds, separate nodes {seconds['alone']:.0f}, no cache {seconds['no cache']:.0f} "
        f"({saves:+.1%}); hits {stats['hit_rate_pool']:.1%} against {stats['hit_rate_alone']:.1%}, at most {best:.1%}."
    )


def shown(stats: dict[str, Any]) -> Table:
    made = Table(title=f"{stats['requests']} requests in {stats['seconds']:.0f} s")
    names = list(stats["prompt_tokens"])
    for name in ("", *names):
        made.add_column(name, justify="right")
    for label, key, form in (
        ("prompt, tokens", "prompt_tokens", ".0f"),
        ("answer, tokens", "output_tokens", ".0f"),
        ("found of a prompt", "hit_share_of_requests", ".1%"),
    ):
        made.add_row(label, *(format(stats[key][name], form) for name in names))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--trace", metavar="FILE", help="requests in Mooncake's format, .jsonl or .jsonl.xz")
    made.add_argument("--model", default="llama3-70b-8xa800", help="step times of a node: a preset, or FILE.json")
    made.add_argument("--nodes", type=int, default=8, help="nodes that keep blocks (default: 8)")
    made.add_argument("--node-blocks", type=int, default=6000, help="512-token blocks of each node (default: 6000)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the statistics")
    args = made.parse_args(argv)
    console = Console(stderr=True)
    try:
        if args.nodes < 1 or args.node_blocks < 1:
            raise ValueError("--nodes and --node-blocks must be at least 1")
        model = preset(args.model)
        path = Path(args.trace) if args.trace else find_trace("conversation")
        if path is None:
            raise ValueError(HINT)
        rows = list(read_trace(path))
        if not rows:
            raise ValueError(f"--trace {path} has no requests")
    except (OSError, ValueError) as error:
        console.print(f"trace_stats: {error}", style="red")
        return 2
    stats = statistics(rows, model, args.nodes, args.node_blocks)
    Console().print(shown(stats))
    print(
        f"{stats['distinct_blocks']} distinct of {stats['blocks']} blocks, {stats['used_once']:.1%} of them used once; "
        f"the most used hundredth has {stats['reuses_of_top_1_percent']:.1%} of all reuses; "
        f"{stats['requests_without_hit']:.1%} of the requests could find nothing."
    )
    print(verdict(stats))
    if args.json:
        config = {"trace": path.name, "model": args.model, "nodes": args.nodes, "node_blocks": args.node_blocks}
        write_result(config | {"statistics": stats}, numbers(path.name, stats), args.json)
    return 0
